"""Facts of this process, and how they are written."""

from __future__ import annotations

import os

import pytest

from fedspec_dist.doctor.facts import Facts, allowed_cpus, by_host, ranges, versions


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 8], "0-3, 8"), ([5, 1, 0, 5], "0-1, 5"), ([0, 2], "0, 2")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_versions_of_what_is_there_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions(cuda="13.0", nccl=None)
    assert set(found) == {"python", "fedspec_dist", "torch", "numpy", "cuda", "nccl"}
    assert (found["cuda"], found["nccl"]) == ("13.0", "none")
    assert found["torch"][0].isdigit()


def test_cpus_are_those_left_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allowed_cpus() == sorted(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")  # not everywhere
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert allowed_cpus() == [0]


def test_ranks_by_host_in_their_order() -> None:
    facts = [Facts(rank, host, 0, {}, "") for rank, host in enumerate(["b", "a", "b"])]
    assert {host: [one.rank for one in ranks] for host, ranks in by_host(facts).items()} == {"b": [0, 2], "a": [1]}
