"""What a process sees to from its first line on: that it ends with its parent, and how Ctrl-C ends it. No torch.

A launcher that is killed cannot end its ranks. Left alone they would train on, or join the next launcher's store and
take the places of its own ranks. Linux only; elsewhere nothing happens here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# Of a rank, and not of the launcher that started it: torchrun's agent, submitit's controller.
_MARKS = ("TORCHELASTIC_RUN_ID", "SUBMITIT_LOCAL_GLOBALID")
_PR_SET_PDEATHSIG = 1
# The launcher is not in this namespace of processes: it is outside of the rank's own container.
OUT_OF_SIGHT = 0
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_PROC = Path("/proc")
# Loaded before any fork, after which little is safe.
_prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """From now on the kernel sends this process a signal when its parent ends, however that ends.

    `parent` is who it should be: if that one has ended already, this process ends here. So it also serves as
    `preexec_fn` of a new process, as `partial(die_with_parent, os.getpid())`. The kernel looks at the *thread* that
    started the process: start from one that lives as long as the parent does.
    """
    if _prctl is None:
        return
    _prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end_with_launcher() -> None:
    """First thing in a rank: end with the launcher, or now if that has ended already.

    Without a launcher that is known to be there (plain python, srun, whatever is started by a script or by nohup)
    nothing happens.
    """
    mark = next((name for name in _MARKS if name in os.environ), None)
    if mark is None or not (_PROC / "self" / "environ").exists():
        return
    launcher = launcher_pid(mark)
    if launcher == OUT_OF_SIGHT:
        return
    if launcher is None:
        sys.stderr.write("the launcher of this rank has ended before the rank began; ending this rank\n")
        sys.stderr.flush()
        os._exit(1)
    if launcher == os.getppid():
        die_with_parent(launcher)
    else:  # the kernel tells of a direct parent only, and between the two is a script
        _die_with(launcher)


def launcher_pid(mark: str = "") -> int | None:
    """The nearest ancestor that is no rank or a script around one; None where there is no launcher or it has ended.

    It is known by its program: a rank without its launcher belongs to init or to some other collector of orphans.
    `OUT_OF_SIGHT` where every process that can be seen above this one is one of the rank's own.
    """
    mark = mark or next((name for name in _MARKS if name in os.environ), "")
    if not mark:
        return None
    for pid in _ancestors():
        try:
            if f"\0{mark}=".encode() in b"\0" + (_PROC / str(pid) / "environ").read_bytes():
                continue
            program = os.readlink(_PROC / str(pid) / "exe")
        except OSError:  # another user's, so not our launcher; or gone
            return None
        return pid if "python" in Path(program).name or program == os.readlink(_PROC / "self" / "exe") else None
    return OUT_OF_SIGHT


def identity(pid: int) -> str:
    """A name that no other process has, on any host, in any container, now or later; empty if there is no such."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink(_PROC / "self" / "ns" / "pid")
        return f"{boot} {space} {pid} {_stat(pid)[19]}"
    except (OSError, IndexError):
        return ""


def kill(name: str, only_if_stopped: bool = False) -> bool:
    """SIGKILL to the process with this identity, if it is on this host and still there (and stands still)."""
    parts = name.rsplit(" ", 2)
    if len(parts) != 3 or not parts[1].isdecimal() or identity(int(parts[1])) != name:
        return False
    with contextlib.suppress(OSError):
        if only_if_stopped and _stat(int(parts[1]))[0] not in "Tt":
            return False
        os.kill(int(parts[1]), signal.SIGKILL)
        return True
    return False


def say_interrupted() -> None:
    """Until somebody else heeds Ctrl-C: a sentence instead of the traceback of whatever was being imported."""

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted\n")
        os._exit(_INTERRUPTED)

    # Not where it is ignored, as for what a shell starts in the background.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid:
        yield pid
        try:
            pid = int(_stat(pid)[1])
        except (OSError, IndexError, ValueError):
            return


def _stat(pid: int) -> list[str]:
    """Fields of `/proc/PID/stat` behind the program's name, which may have spaces in it: state, parent, ..."""
    return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _die_with(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except (OSError, AttributeError):  # an old kernel or python
        return

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="fedspec-launcher", daemon=True).start()
