"""What the start of a run compares between its ranks, and writes down of itself before the first round."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedspec_dist
from fedspec_dist.config import Config
from fedspec_dist.core.draws import keyed
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.rounds.federation import Federation
from fedspec_dist.runs.folder import RunFolder, cannot_write, git_state, write_json, write_text
from fedspec_dist.runs.identity import Identity, identity_of, used_plugins
from fedspec_dist.runs.safe_files import read_object
from fedspec_dist.runs.sources import copy_sources, module_digest

log = logging.getLogger(__name__)

_PACKAGES = ("fedspec_dist", "torch", "torchvision", "numpy")


def require_same_config(config: Config, runtime: Runtime) -> None:
    """Also in what has no part in the result: ranks must agree on when to checkpoint, too."""
    everything = config.to_dict()
    del everything["data"]["root"], everything["cluster"]  # may differ between hosts
    digest = zlib.crc32(json.dumps(everything, sort_keys=True).encode())
    digests = runtime.collectives.all_gather(torch.tensor([digest]), "start")
    if different := _other_than_rank_0(digests):
        raise ValueError(
            f"ranks {different} were started with another config than rank 0: give every torchrun of the job the same "
            "file and overrides"
        )


def agree_on_identity(config: Config, runtime: Runtime) -> Identity:
    """The data and the sources of this run, the same on all ranks.

    One rank of each host reads the files while the others wait. Data that no host has yet, since they are to be
    downloaded, are unknown.

    Raises:
        ValueError: a host has other data or other sources than rank 0's.
    """
    with keyed(torch.device("cpu"), config.seed, "data"):  # a data set of a user's own may draw, as when it is loaded
        mine = identity_of(config, with_data=runtime.prepares_data)
    sources = json.dumps([sorted(mine.plugins.items()), mine.package])
    row = torch.tensor([_number(mine.data), zlib.crc32(sources.encode())])
    rows = runtime.collectives.all_gather(row, "comparison of the data")
    if different := _other_than_rank_0(rows[:, 1:]):
        raise ValueError(
            f"ranks {different} have other sources of fedspec_dist or of the plugins than rank 0: install the same "
            "version on every host, and start from the same files"
        )
    known = [rank for rank, number in enumerate(rows[:, 0].tolist()) if number]
    if different := [rank for rank in known if rows[rank, 0] != rows[known[0], 0]]:
        raise ValueError(
            f"data.dataset: the hosts of ranks {different} have other data than rank {known[0]}'s: the files of "
            f"{config.data.dataset.type} must have the same content on every host"
        )
    return replace(mine, data=_text(int(rows[known[0], 0])) if known else "")


def _number(digest: str) -> int:
    return int.from_bytes(bytes.fromhex(digest), "big", signed=True)


def _text(number: int) -> str:
    return number.to_bytes(8, "big", signed=True).hex()


def _other_than_rank_0(rows: Tensor) -> list[int]:
    different: list[int] = (rows != rows[0]).any(dim=1).nonzero().reshape(-1).tolist()
    return different


def write_account(
    config: Config,
    runtime: Runtime,
    federation: Federation,
    module: nn.Module,
    folder: RunFolder,
    completed: int,
    identity: Identity,
    accepted: Sequence[str],
) -> None:
    """What is about to run, on the console, in `config.yaml`, in `environment.json` and in `plugins/`."""
    hosts = _gather_text(f"{runtime.environment.host} {_device_name(runtime.device)}", runtime.collectives)
    if not runtime.is_main:
        return
    dataset = federation.dataset
    log.info(
        "%s: %d rounds of %d from %d clients; %s on %s %s, %d parameters; %d rank(s), %s",
        config.name,
        config.rounds,
        config.cohort_size(len(federation.clients)),
        len(federation.population),
        config.model.type,
        config.data.dataset.type,
        "x".join(map(str, dataset.input_shape)),
        sum(parameter.numel() for parameter in module.parameters()),
        runtime.num_ranks,
        runtime.backend if runtime.num_ranks > 1 else _device_name(runtime.device),
    )
    write_text(folder.config, config.to_yaml())
    write_json(folder.path / "data.json", {"input_shape": list(dataset.input_shape), **dataset.facts})
    plugins = sorted({*config.plugins, *used_plugins(config)})
    try:
        copy_sources(plugins, folder.plugins)
    except OSError as error:
        raise cannot_write(folder.plugins, error) from error
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "ranks": hosts,
        "backend": runtime.backend,
        "resumed_after_round": completed,
        "identity": identity.to_dict(),
        "changes_accepted": list(accepted),
        "plugins": {module: module_digest(module) for module in plugins},  # those that only observe, too
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "cuda": torch.version.cuda if runtime.device.type == "cuda" else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **({"attackers": list(federation.attackers)} if federation.attackers else {}),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        **git_state(Path(fedspec_dist.__file__).parent),
    }
    starts = _earlier_starts(folder)
    if completed and starts:
        _warn_of_other_versions(starts[-1], start)
    write_json(folder.environment, {"starts": [*starts, start]})


def accepted_changes(folder: RunFolder) -> list[str]:
    """What changed between the starts of a run and was accepted, in words."""
    starts = read_object(folder.environment).get("starts")
    accepted = [start.get("changes_accepted") for start in starts if isinstance(start, dict)] if starts else []
    return [str(change) for changes in accepted if isinstance(changes, list) for change in changes]


def _earlier_starts(folder: RunFolder) -> list[Any]:
    """Those that `environment.json` has; one that cannot be read is kept under another name."""
    content = read_object(folder.environment)
    starts = content.get("starts", [content])  # earlier versions kept the last start alone
    if content and isinstance(starts, list):
        return starts
    if folder.environment.exists():
        kept = folder.environment.with_name("environment.damaged.json")
        log.warning("%s cannot be read and is now %s", folder.environment, kept.name)
        folder.environment.replace(kept)
    return []


def _warn_of_other_versions(before: Any, now: dict[str, Any]) -> None:
    """A run that goes on with another torch is not the run that its first rounds belong to."""
    for name in ("python", *_PACKAGES):
        then = before.get(name) if isinstance(before, dict) else None
        if then not in (None, now[name]):
            log.warning("resuming with %s %s; the rounds so far had %s", name, now[name], then)


def _gather_text(text: str, collectives: Collectives, width: int = 128) -> list[str]:
    """One line of each rank, cut to `width` bytes."""
    data = torch.zeros(width, dtype=torch.uint8)
    encoded = text.encode()[:width]
    data[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    rows = collectives.all_gather(data, "start")
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
