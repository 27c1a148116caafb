"""Freed memory stays with the process."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

# How much larger the process is after 32 MiB of tensors were made and freed; in MiB.
PROGRAM = """
import sys
import torch
from fedspec_dist.processes.memory import keep_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
if sys.argv[1] == "keep":
    keep_freed_memory()
before = resident()
tensors = [torch.ones(2**20) for _ in range(8)]
del tensors
print(resident() - before)
"""


def _kept(how: str) -> float:
    command = [sys.executable, "-c", PROGRAM, how]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=root)
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_stays_for_the_next_step() -> None:
    assert _kept("default") < 8
    assert _kept("keep") > 24
