"""The real command line as a user types it: with a time limit, its output kept, and nothing left running behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FAULTY = Path(__file__).with_name("faulty_main.py")
# Keys of a record that depend on the machine and on the number of ranks.
MACHINE_KEYS = ("seconds_", "rank_imbalance", "bytes_exchanged")


@dataclass(frozen=True)
class Ended:
    code: int
    output: str  # of all processes, stdout and stderr together
    seconds: float

    @property
    def ours(self) -> str:
        """The output without torchrun's last words, which repeat our message."""
        return self.output.partition("errors.ChildFailedError")[0]

    def expect(self, code: int, *parts: str) -> Ended:
        """Itself, when the exit code is `code` and every part is in the output."""
        missing = [part for part in parts if part not in self.output]
        assert self.code == code, f"exit code {self.code}, not {code}, after {self.seconds:.0f} s:\n{self.output}"
        assert not missing, f"not in the output: {missing}\n{self.output}"
        return self

    def expect_failure(self, *parts: str) -> Ended:
        assert self.code != 0, f"exit code 0:\n{self.output}"
        return self.expect(self.code, *parts)


class Job:
    """A running command. As a context manager it kills what is left of it at the end."""

    def __init__(self, command: Sequence[str], folder: Path, variables: dict[str, str]) -> None:
        self._log = folder / f"output-{time.monotonic_ns()}.txt"
        self._started = time.monotonic()
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "TORCHELASTIC"))
        }
        # As in an activated environment: its programs, torchrun among them, are found by name.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        environment |= {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        environment |= variables
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def ranks(self) -> dict[int, int]:
        """Rank -> process id, of the ranks that run now."""
        found = {}
        for pid in [self.process.pid, *_descendants(self.process.pid)]:
            with contextlib.suppress(OSError, ValueError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = [item for item in variables if item.startswith(b"RANK=")]
                if rank and b"torch.distributed" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.setdefault(int(rank[0][5:]), pid)
        return found

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                code = self.process.poll()
                self.kill()
                raise AssertionError(f"{what} did not come ({'running' if code is None else code}):\n{self.output}")
            time.sleep(0.02)

    def wait(self, timeout_s: float = 60) -> Ended:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None
        return Ended(code, self.output, time.monotonic() - self._started)

    def kill(self) -> None:
        for pid in [*_descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def start(
    folder: Path,
    *arguments: str,
    ranks: int = 0,
    launcher: Sequence[str] = ("--standalone",),
    faulty: bool = False,
    **variables: str,
) -> Job:
    """`fedspec_dist.main ARGUMENTS` in `folder`: under torchrun with `ranks`, or plain python without."""
    program = [str(FAULTY)] if faulty else ["-m", "fedspec_dist.main"]
    torchrun = ["-m", "torch.distributed.run", *launcher, "--nproc_per_node", str(ranks)] if ranks else []
    return Job([sys.executable, *torchrun, *program, *arguments], folder, variables)


def run(folder: Path, *arguments: str, timeout_s: float = 60, **options: Any) -> Ended:
    with start(folder, *arguments, **options) as job:
        return job.wait(timeout_s)


def run_folder(folder: Path, output: str = "runs") -> Path:
    (found,) = (folder / output).iterdir()
    return found


def rounds_done(folder: Path, output: str = "runs") -> int:
    """Lines of the metrics file of the only run, 0 before there is one."""
    files = list((folder / output).glob("*/metrics.jsonl"))
    return files[0].read_text().count("\n") if files else 0


def model_of(folder: Path, output: str = "runs") -> bytes:
    return (run_folder(folder, output) / "model.safetensors").read_bytes()


def _strict(constant: str) -> Any:
    raise AssertionError(f"{constant} in a JSON file")


def metrics_of(folder: Path, output: str = "runs") -> list[dict[str, Any]]:
    """The records of the only run, read strictly, without what depends on the machine."""
    lines = (run_folder(folder, output) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=_strict) for line in lines]
    return [{key: value for key, value in r.items() if not key.startswith(MACHINE_KEYS)} for r in records]


def results_of(folder: Path, output: str = "runs") -> tuple[bytes, list[dict[str, Any]]]:
    return model_of(folder, output), metrics_of(folder, output)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found
