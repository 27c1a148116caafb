"""What a rank can say of its process and its host without talking to anybody. No torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Facts:
    """Of one rank. Travels as JSON, so plain values only."""

    rank: int
    host: str
    local_rank: int
    versions: dict[str, str]
    config: str  # its fingerprint
    device: str = "cpu"
    gpu: str = ""  # its unique name
    gpu_on_bus: str = ""  # and its place on the bus, which slices (MIG) of one GPU share
    gpu_problem: str = ""  # why it does not compute
    gpus_visible: int = 0
    backend: str = "gloo"  # what a run would use
    backend_problem: str = ""  # why it would not start
    threads: int = 1
    cpus: list[int] = field(default_factory=list)  # that this process may use
    name_resolves_to: list[str] = field(default_factory=list)
    name_leads_here: bool = True
    interfaces: dict[str, list[str]] = field(default_factory=dict)
    socket_variables: dict[str, str] = field(default_factory=dict)
    port: int = 0  # one that could be listened at
    port_is_ephemeral: bool = False
    data_problem: str = ""
    data_found: bool = True


def versions(**more: str | None) -> dict[str, str]:
    """Of what decides results and whether ranks understand each other."""
    found = {"python": platform.python_version()}
    for package in ("fedspec_dist", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {name: text or "none" for name, text in more.items()}


def allowed_cpus() -> list[int]:
    """Those that the scheduler left to this process."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 8` for [0, 1, 2, 3, 8]."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def by_host(facts: Iterable[Facts]) -> dict[str, list[Facts]]:
    hosts: dict[str, list[Facts]] = {}
    for one in facts:
        hosts.setdefault(one.host, []).append(one)
    return hosts
