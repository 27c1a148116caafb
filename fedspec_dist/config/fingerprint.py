"""What decides the result of a run, as a few digits: the name of its folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspec_dist.config import methods
from fedspec_dist.config.section import DECIDING

if TYPE_CHECKING:
    from fedspec_dist.config.schema import Config


def fingerprint(config: Config, defaults: dict[str, Any]) -> str:
    """Eight hex digits of all that decides the result; `defaults` are those of the schema.

    Where files lie, what is reported, and how the work is spread do not: a run may go on elsewhere, with
    another time limit, at another number of ranks. Nor does `on_nonfinite`: it decides whether a run goes on,
    and one that ended at a bad client may go on without it. Nor do the names of plugins: what they add is named
    where it is used.
    """
    deciding = config.stated(DECIDING)
    if config.phases:  # whole ones, and nothing that none of them uses
        deciding["phases"] = [phase.model_dump(context=DECIDING) for phase in config.phases]
        for key in deciding["phases"][0].keys() - {"rounds"}:
            del deciding[key]
    for key in ("name", "output", "checkpoint", "tracking", "cluster"):
        del deciding[key]
    # These came after runs had been made. At what those did they have no part, so that they are found again.
    if config.clients.attack.type == "none":
        del deciding["clients"]
    for part in (deciding, *deciding["phases"]):
        if "server" in part and not part["server"]["transforms"]:
            del part["server"]["transforms"]
    for key in ("root", "download"):
        del deciding["data"][key]
    if config.init is not None and config.init.run is not None:  # wherever the folder lies; its name has a hash
        deciding["init"]["run"] = Path(config.init.run).name
    for key in ("device", "backend", "aggregation", "timeout_s", "on_nonfinite", "interface"):
        del deciding["runtime"][key]
    # These have no part either, but once had one. At their defaults, as in the runs of that time, those are found.
    deciding |= {"eval": {"every": defaults["eval"]["every"], "batch_size": defaults["eval"]["batch_size"]}}
    deciding["plugins"] = defaults["plugins"]
    idle = [] if _may_sketch(config) else ["sketch_memory_mb"]
    if config.runtime.executor != "batched":  # the others have the bits of one client after the other
        deciding["runtime"].pop("clients_per_batch", None)
        idle.append("executor")
    for key in idle:
        deciding["runtime"][key] = defaults["runtime"][key]
    text = json.dumps(deciding, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _may_sketch(config: Config) -> bool:
    """Whether sketches are used; of methods that a plugin adds this is not known."""
    for server in (phase.server for phase in config.schedule()):
        chosen = [("server.aggregator", server.aggregator), ("server.weights", server.weights)]
        chosen += [("server.transforms", choice) for choice in server.transforms]
        entries = [methods.FAMILIES[key].table[choice.type] for key, choice in chosen]
        if any("sketches" in entry.needs or not entry.is_ours for entry in entries):
            return True
    return False
