"""The store through which ranks find each other, cleared of what an earlier start of the same job left in it."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import torch.distributed as dist

from fedspec_dist.processes.environment import Environment

_POLL_S = 0.01
_AGAIN_S = 0.5


@dataclass(frozen=True)
class Introduction:
    """What ranks tell each other before there is a process group."""

    host: str
    reached: str  # the address at which this rank found rank 0's store, empty where that is on this host
    known: bool  # whether the host name leads others here
    gpu: str = ""  # its unique name
    bus: str = ""  # and its place on the host's bus, which slices (MIG) of one GPU share


def this_start(store: Any, environment: Environment, deadline: float) -> str:
    """A name for this start of the job that all its ranks agree on, for a `PrefixStore`.

    torchrun keeps one store over its restarts, with the addresses and failures of ranks that are no more in it, and
    no variable that it sets is sure to be the same on all hosts and new at each start. So every rank makes up a name
    and rank 0 answers each of them, under that name, with its own: an answer to a new name cannot be an old one.

    With a fixed port, ranks of a launcher that was killed can come to the store of the next one. Rank 0 does not answer
    who has another launcher than itself on its own host, and so an orphan is never answered, nor ever answers.

    Raises:
        RuntimeError: some rank did not come before `deadline` (of `time.monotonic`).
    """
    mine, began = uuid.uuid4().hex, time.monotonic()
    rank = environment.rank
    if rank:
        place = {"host": environment.host, "group": environment.group, "launcher": environment.launcher}
        _wait_for_welcome(store, rank, json.dumps({"name": mine, **place}), mine, deadline)
        name = store.get(f"welcome/{mine}").decode()
        store.set(f"joined/{name}/{rank}", "1")
        return str(name)
    missing, answered = set(range(1, environment.num_ranks)), set()
    hosts, strangers = {0: environment.host}, set()
    while missing:
        for other in sorted(missing):
            if store.check([f"joined/{mine}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                theirs = json.loads(store.get(f"hello/{other}"))
                if _is_stranger(theirs, environment):
                    strangers.add(other)
                    continue
                hosts[other] = theirs["host"]
                if theirs["name"] not in answered:
                    answered.add(theirs["name"])
                    store.set(f"welcome/{theirs['name']}", mine)
        if missing and time.monotonic() > deadline:
            present = [f"{other} ({hosts[other]})" for other in sorted(hosts) if other not in missing]
            others = f"; ranks {sorted(strangers & missing)} of another launcher did" if strangers & missing else ""
            raise RuntimeError(
                f"ranks {sorted(missing)} did not come within {time.monotonic() - began:.0f} s (runtime.timeout_s); "
                f"there are rank {', '.join(present)}{others}"
            )
        time.sleep(_POLL_S if missing else 0)
    return mine


def _is_stranger(theirs: dict[str, Any], mine: Environment) -> bool:
    same_place = (theirs["host"], theirs["group"]) == (mine.host, mine.group)
    return same_place and bool(theirs["launcher"]) and theirs["launcher"] != mine.launcher


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


def _wait_for_welcome(store: Any, rank: int, hello: str, name: str, deadline: float) -> None:
    said = -inf
    while not store.check([f"welcome/{name}"]):
        now = time.monotonic()
        if now > deadline:
            raise RuntimeError("rank 0 did not come")
        if now - said > _AGAIN_S:  # somebody of another start may have said hello over it
            store.set(f"hello/{rank}", hello)
            said = now
        time.sleep(_POLL_S)
