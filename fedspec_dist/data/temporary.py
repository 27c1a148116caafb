"""Folders that are filled before anybody else sees their files, and what is left of them after a kill."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path


def temporary_name(folder: Path) -> Path:
    """A name beside `folder` that no other process of any host uses."""
    return folder.with_name(f".{folder.name}.tmp-{socket.gethostname()}-{os.getpid()}")


def remove_leftovers(parent: Path) -> None:
    """Removes temporary folders of processes of this host that are no more."""
    pattern = re.compile(rf"\..+\.tmp-{re.escape(socket.gethostname())}-(\d+)")
    for folder in parent.glob(".*.tmp-*"):
        match = pattern.fullmatch(folder.name)
        if match and not _is_alive(int(match.group(1))):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
