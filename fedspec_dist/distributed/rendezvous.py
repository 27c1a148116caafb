"""The store through which ranks find each other, cleared of what an earlier start of the same job left in it."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

_POLL_S = 0.01


@dataclass(frozen=True)
class Introduction:
    """What ranks tell each other before there is a process group."""

    host: str
    reached: str  # the address at which this rank found rank 0's store, empty where that is on this host
    known: bool  # whether the host name leads others here
    gpu: str = ""  # its unique name
    bus: str = ""  # and its place on the host's bus, which slices (MIG) of one GPU share


def this_start(store: Any, rank: int, num_ranks: int, timeout_s: float, host: str = "") -> str:
    """A name for this start of the job that all its ranks agree on, for a `PrefixStore`.

    torchrun keeps one store over its restarts, with the addresses and failures of ranks that are no more in it, and
    no variable that it sets is sure to be the same on all hosts and new at each start. So every rank makes up a name
    and rank 0 answers each of them, under that name, with its own: an answer to a new name cannot be an old one.

    Raises:
        RuntimeError: some rank did not come in time.
    """
    mine = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    if rank:
        store.set(f"hello/{rank}", f"{mine} {host}")
        _wait(store, f"welcome/{mine}", deadline, "rank 0")
        name = store.get(f"welcome/{mine}").decode()
        store.set(f"joined/{name}/{rank}", "1")
        return name
    missing, answered, hosts = set(range(1, num_ranks)), set(), {0: host}
    while missing:
        for other in sorted(missing):
            if store.check([f"joined/{mine}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                theirs, _, hosts[other] = store.get(f"hello/{other}").decode().partition(" ")
                if theirs not in answered:
                    answered.add(theirs)
                    store.set(f"welcome/{theirs}", mine)
        if missing and time.monotonic() > deadline:
            present = [f"{other} ({hosts[other]})" for other in range(num_ranks) if other not in missing]
            raise RuntimeError(
                f"ranks {sorted(missing)} did not come within {timeout_s:.0f} s; there are rank {', '.join(present)}"
            )
        time.sleep(_POLL_S if missing else 0)
    return mine


def introduce(store: Any, rank: int, num_ranks: int, mine: Introduction) -> list[Introduction]:
    """Everybody's, by rank."""
    store.set(f"introduction/{rank}", json.dumps(asdict(mine)))
    keys = [f"introduction/{other}" for other in range(num_ranks)]
    store.wait(keys)
    return [Introduction(**json.loads(text)) for text in store.multi_get(keys)]


def part_of(store: Any, *names: str) -> Any:
    """The keys of `store` below `names`, over a connection of its own: the given one may be busy in a blocking wait."""
    connection = store.clone() if hasattr(store, "clone") else store
    return dist.PrefixStore("/".join(names), connection)


def _wait(store: Any, key: str, deadline: float, who: str) -> None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{who} did not come")
        time.sleep(_POLL_S)
