"""`--cluster local`: submitit's local executor, detached from the terminal and with failures accounted for.

submitit's controller starts the tasks, and starts them again when one asks for it. Ours lives in a session of its own,
so that Ctrl-C in `--follow` and the end of a login leave the job alone; it ends the other tasks when one is gone, and
it starts a failed run again while `cluster.requeue_on_failure` allows it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path

from submitit.core.utils import JobPaths
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, Controller, LocalExecutor, LocalJob

from fedspec_dist.processes.orphans import die_with_parent
from launch.aftermath import settle
from launch.attempts import LOCAL_RESTARTS
from launch.cluster import LAUNCHER_VARIABLES, python_variables
from launch.queue import CONTROLLER
from launch.record import SubmissionFolder, run_of

# Ranks tell each other of failures within seconds; this is for those that had not met yet.
_GRACE_S = 30.0
_POLL_S = 0.1
NO_LIMIT_MINUTES = 366 * 24 * 60


class DetachedExecutor(LocalExecutor):
    """One run on this machine. Parameters: tasks_per_node, timeout_min, signal_delay_s, and `variables`."""

    def _submit_command(self, command: str) -> LocalJob:
        tasks = self.parameters["tasks_per_node"]
        variables = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(tasks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.parameters["timeout_min"])),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(self.parameters["signal_delay_s"]),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
        }
        folder = Path(self.folder)
        with (folder / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", CONTROLLER, str(folder)],
                env={**self.parameters["variables"], **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return LocalJob(folder=folder, job_id=str(process.pid), process=process, tasks=list(range(tasks)))


def local_variables(variables: Mapping[str, str], root: Path, gpus: int | None) -> dict[str, str]:
    """The environment of a local job: of another launcher or a surrounding SLURM job nothing is left.

    `gpus`: None leaves the visible GPUs as they are, 0 hides them, N shows the first N of them.
    """
    kept = {
        name: value
        for name, value in variables.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("SLURM_", "SUBMITIT_"))
    }
    kept |= python_variables(kept, root)
    if gpus is not None:
        shown = kept.get("CUDA_VISIBLE_DEVICES")
        devices = (
            [device for device in shown.split(",") if device] if shown is not None else list(map(str, range(gpus)))
        )
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:gpus])
    return kept


class LocalController(Controller):
    def start_tasks(self) -> None:
        """As submitit does, and each dies with this process, from its first line on and however this one ends."""
        for rank in range(self.ntasks):
            log = JobPaths(self.folder, self.pid, rank).stdout.open("a")
            self.stdouts.append(log)
            names = {"LOCALID": rank, "GLOBALID": rank, "JOB_ID": self.pid}
            variables = {f"SUBMITIT_LOCAL_{name}": str(value) for name, value in names.items()}
            task = subprocess.Popen(
                self.command,
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            self.tasks.append(task)

    def wait(self, freq: int = 0) -> Sequence[int | None]:
        """Exit codes once all tasks have ended, or some time after one of them has failed, or at the time limit."""
        started, failed_at, warned = time.monotonic(), None, False
        while True:
            codes = [task.poll() for task in self.tasks]
            now = time.monotonic()
            if all(code is not None for code in codes) or now - started > self.timeout_s:
                return codes
            if failed_at is None and any(code not in (None, 0) for code in codes):
                failed_at = now
            if failed_at is not None and now - failed_at > _GRACE_S:
                return codes
            if not warned and now - started > self.timeout_s - self.signal_delay_s:
                warned = True
                self._forward_signal(signal.SIGUSR2)
            time.sleep(_POLL_S)

    def run(self, max_retry: int = 0) -> None:
        for restart in count():
            os.environ[LOCAL_RESTARTS] = str(restart)
            try:
                self.start_tasks()
                codes = self.wait()
            finally:
                self.kill_tasks()
            if LOCAL_REQUEUE_RETURN_CODE not in codes and not self._after_failure(codes, restart):
                return

    def _after_failure(self, codes: Sequence[int | None], restart: int) -> bool:
        code = next(filter(None, codes), -signal.SIGKILL if None in codes else 0)
        files = SubmissionFolder(run_of(self.folder, 0))
        text, again = settle(files, self.folder, self.pid, code, ended=False, restart=restart)
        if text:
            with (self.folder / f"{self.pid}_0_log.out").open("a", encoding="utf-8") as log:
                log.write(f"launch: {text}; exit codes of the ranks: {list(codes)}\n")
        return again


if __name__ == "__main__":
    LocalController(Path(sys.argv[1])).run()
