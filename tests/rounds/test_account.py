"""Ranks that would work on other data, or with other sources, than rank 0 are found before the first round."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from fedspec_dist.config import load
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.processes.environment import Environment
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.processes.stop import StopRequest
from fedspec_dist.rounds.account import agree_on_identity
from fedspec_dist.runs import identity
from tests.distributed.harness import run_ranks
from tests.test_identity import write_data

Said = tuple[str, str]  # the digest that was agreed on, or the error


ONE = "1" * 16
# What each host has (0: no data yet), each rank's package, and what is said.
CASES = {
    "equal": ([7, 7], [ONE] * 4, ""),
    "only one host has the data yet": ([7, 0], [ONE] * 4, ""),
    "nobody has": ([0, 0], [ONE] * 4, ""),
    "another host's data": ([7, 8], [ONE] * 4, r"the hosts of ranks \[2\] have other data than rank 0's"),
    "another rank's sources": ([7, 7], [ONE, ONE, ONE, "2" * 16], r"ranks \[3\] have other sources"),
}


def _agree(collectives: Collectives, folder: str) -> dict[str, Said]:
    """Two ranks a host, each host with a folder of its own."""
    rank = collectives.rank
    host, local = divmod(rank, 2)
    environment = Environment(rank, collectives.num_ranks, local, 2, launched=True)
    runtime = Runtime(environment, torch.device("cpu"), "gloo", collectives, StopRequest())
    config = load(None, ["data={dataset: npz, path: d.npz, root: nowhere}"])
    said = {}
    for number, (case, (data, packages, _)) in enumerate(CASES.items()):
        place = Path(folder) / f"{number}-{host}"
        place.mkdir(exist_ok=True)
        os.chdir(place)
        if local == 0 and data[host]:
            write_data(place / "d.npz", data[host])
        identity.package_digest = lambda digest=packages[rank]: digest  # type: ignore[assignment]
        try:
            said[case] = agree_on_identity(config, runtime).data, ""
        except ValueError as error:
            said[case] = "", str(error)
    return said


def test_ranks_agree_or_all_say_who_does_not(tmp_path: Path) -> None:
    first, *others = run_ranks(_agree, 4, tmp_path, str(tmp_path))
    assert all(other == first for other in others)
    for case, (data, _, message) in CASES.items():
        digest, error = first[case]
        assert re.search(message, error) if message else error == "", case
        assert bool(digest) == (any(data) and not message), case
