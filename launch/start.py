"""Starting jobs by submitit: with sbatch, as processes of this machine, or in this process."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedspec_dist.config import Cluster, Config, minutes
from launch.cluster import LAUNCHER_VARIABLES, ROOT, Layout, overriding_variables, sbatch_parameters, setup_lines


class SubmitError(RuntimeError):
    """The job was not submitted; the message says what to do."""


def sbatch(folder: Path, config: Config, name: str, after: str | None, jobs: Sequence[Any]) -> list[str]:
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    if shutil.which("sbatch") is None:
        raise SubmitError("there is no sbatch on this machine: submit from a login node, or use --cluster local")
    executor = SlurmExecutor(folder, max_num_timeout=config.cluster.max_requeues)
    setup = setup_lines(sys.executable, ROOT, folder)
    array = len(jobs) if len(jobs) > 1 else 0
    executor.update_parameters(**sbatch_parameters(config.cluster, name, setup, after, array))
    try:
        with (
            clean_environment(config.cluster),
            contextlib.redirect_stderr(io.StringIO()),
        ):  # submitit shows what it also raises
            submitted = executor.submit_array(list(jobs)) if len(jobs) > 1 else [executor.submit(jobs[0])]
    except (FailedJobError, FailedSubmissionError) as error:
        raise SubmitError(
            f"{_sentence(str(error))}. Look at --dry-run; what this cluster has, sinfo and "
            "sacctmgr show associations tell. On a machine without a working SLURM: --cluster local"
        ) from error
    return [job.job_id for job in submitted]


def _sentence(text: str) -> str:
    return f"the job was refused: {'; '.join(line.strip() for line in text.splitlines() if line.strip())}"


@contextlib.contextmanager
def clean_environment(cluster: Cluster) -> Iterator[None]:
    """sbatch copies and obeys the environment: nothing of a surrounding job or launcher must get into the new one."""
    inside = "SLURM_JOB_ID" in os.environ
    overriding = overriding_variables(cluster)
    stale = {
        name: value
        for name, value in os.environ.items()
        if name in LAUNCHER_VARIABLES
        or name in overriding
        or name.startswith("SUBMITIT_")
        or (inside and name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name != "SLURM_CONF")
    }
    for name in stale:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(stale)


def start_here(folder: Path, config: Config, layout: Layout, job: Any, time_limit: bool) -> str:
    from launch.local import NO_LIMIT_MINUTES, DetachedExecutor, local_variables

    executor = DetachedExecutor(folder, max_num_timeout=config.cluster.max_requeues)
    executor.update_parameters(
        tasks_per_node=layout.ranks,
        timeout_min=minutes(config.cluster.time) if time_limit else NO_LIMIT_MINUTES,
        signal_delay_s=config.cluster.signal_before_s,
        variables=local_variables(os.environ, ROOT, config.cluster.gpus_per_node),
    )
    return executor.submit(job).job_id


def run_here(folder: Path, job: Any) -> tuple[str, Path, int]:
    """Job id, log and exit code of a run in this process."""
    from submitit import DebugExecutor

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    submitted = DebugExecutor(folder).submit(job)
    try:
        return submitted.job_id, submitted.paths.stdout, submitted.result()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
