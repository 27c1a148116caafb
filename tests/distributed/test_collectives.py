"""A collective is waited for from here, whatever the backend does; what ends the wait has a name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from fedspec_dist.distributed import collectives as module
from fedspec_dist.distributed.collectives import CollectiveError, Collectives, ProcessGroup, finish
from fedspec_dist.processes import probe
from tests.distributed.harness import run_ranks

CPU = torch.device("cpu")


class _Never:
    """The work of a backend that has no word for a peer that is gone."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        time.sleep(60)


def test_a_wait_without_end_is_ended_with_the_reason() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 7 is gone"):
        finish(_Never(), CPU, lambda: "rank 7 is gone" if time.monotonic() - began > 0.3 else "")
    assert time.monotonic() - began < 2


def _each_kind(collectives: Collectives) -> list[str]:
    """What each collective says when the backend never returns."""
    for name in ("broadcast", "all_to_all_single"):
        setattr(module.dist, name, lambda *_, **__: _Never())
    module._all_gather_single = lambda *_, **__: _Never()
    began = time.monotonic()
    group = ProcessGroup(CPU, lambda since: "rank 1 is gone" if time.monotonic() - began > 0.3 else "")
    said = []
    for run in (
        lambda: group.broadcast(torch.zeros(2), "a broadcast"),
        lambda: group.all_gather(torch.zeros(2), "a gathering"),
        lambda: group.all_to_all([torch.zeros(1)] * 2, [1, 1], "an exchange"),
    ):
        try:
            run()
        except CollectiveError as error:
            said.append(str(error))
    return [*said, group.current]


def test_every_collective_says_where_it_was_and_why_it_ended(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(_each_kind, 2, tmp_path)):
        start = f"rank {rank} lost contact with the other ranks during"
        wheres = ("a broadcast", "a gathering", "an exchange")
        assert said == [*(f"{start} {where}: rank 1 is gone" for where in wheres), "an exchange"]


def _hanging_probe(collectives: Collectives) -> tuple[str, float, bool, float]:
    """Of a backend that does not return from connecting the ranks."""
    assert isinstance(collectives, ProcessGroup)
    module.dist.new_group = lambda *_, **__: time.sleep(60)
    probe._OWN_END_S = 0.1
    began, said = time.monotonic(), ""
    try:
        probe.measure(collectives, "gloo", CPU, 1000, timeout_s=0.5)
    except CollectiveError as error:
        said = str(error)
    seconds = time.monotonic() - began
    return said, seconds, collectives.stuck, float(collectives.all_gather(torch.ones(1), "afterwards").sum())


def test_a_probe_that_hangs_does_not_stop_who_asked(tmp_path: Path) -> None:
    for rank, (said, seconds, stuck, total) in enumerate(run_ranks(_hanging_probe, 2, tmp_path)):
        assert said == f"rank {rank}: gloo does not work between the ranks: not connected after 0 s"
        assert seconds < 5
        assert stuck
        assert total == 2


def _closed(*_: object, **__: object) -> None:
    raise RuntimeError("Connection closed by peer")


def _when_the_backend_fails(collectives: Collectives) -> list[str]:
    module.dist.broadcast = _closed
    said = []
    for known in ("rank 1 has not answered", ""):
        try:
            ProcessGroup(CPU, lambda since, known=known: known).broadcast(torch.zeros(2), "a broadcast")
        except CollectiveError as error:
            said.append(str(error).partition("a broadcast: ")[2])
    return said


def test_the_reason_that_is_known_is_said_and_not_what_the_backend_saw_of_it(tmp_path: Path) -> None:
    """A frozen peer that is killed looks to the backend like any other that is gone."""
    for said in run_ranks(_when_the_backend_fails, 2, tmp_path):
        assert said == ["rank 1 has not answered", "Connection closed by peer"]
