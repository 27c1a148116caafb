"""What the C library does with memory that the program frees."""

from __future__ import annotations

import contextlib
import ctypes

# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next allocation; with another C library, nothing.

    By default it gives the activations of a local step back to the system and takes them again, page by page, in the
    next: over 4,000 page faults in a ResNet-20 step on a CPU, 4 to 6 % of its time. Both settings or none: either of
    them ends glibc's own adjustment of both, and a low mmap threshold doubles the time of a step.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
