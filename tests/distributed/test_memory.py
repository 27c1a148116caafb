"""Freed memory stays with the process."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

# A step's worth of tensors, made and freed again and again; prints the page faults of one repetition.
PROGRAM = """
import resource, sys
import torch
from fedspec_dist.distributed.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    tensors = [torch.ones(2**20) for _ in range(8)]
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


def _faults(how: str) -> float:
    command = [sys.executable, "-c", PROGRAM, how]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=root)
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    default = _faults("default")
    assert default > 1000  # 32 MiB are 8192 pages
    assert _faults("keep") < default / 5
