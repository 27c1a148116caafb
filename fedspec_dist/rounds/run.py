"""One run from start to finish: folder, data, model, resume, training, summary. Every rank runs `execute`."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import fedspec_dist
from fedspec_dist.config import Config
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.distributed.gpus import image_format
from fedspec_dist.distributed.runtime import EXIT_STOPPED, Runtime
from fedspec_dist.rounds.checkpoint import SavedState, load_newest, write_model
from fedspec_dist.rounds.federation import Federation, build_model, load_federation
from fedspec_dist.rounds.loop import Job, train
from fedspec_dist.rounds.phases import Phases
from fedspec_dist.tracking.console import ConsoleTracker, print_summary
from fedspec_dist.tracking.metrics import MetricsFile, NullTracker, Tracker, Trackers, read
from fedspec_dist.tracking.run_folder import RunFolder, git_state, log_to_file, write_json, write_text
from fedspec_dist.tracking.tensorboard import TensorBoard

log = logging.getLogger(__name__)


def execute(config: Config, runtime: Runtime, fresh: bool, console: Console) -> int:
    """Run or resume; returns the exit code."""
    folder = RunFolder(config.run_folder())
    # Who asked for a fresh start wants one, not another each time that torchrun or SLURM starts the job again.
    fresh = fresh and not runtime.environment.restarts
    summary = None if fresh else folder.finished()
    if _agree(runtime, summary is not None):
        if runtime.is_main and summary is not None:
            print_summary(console, summary, folder.path)
            log.info("this run has already finished; --fresh starts it over")
        return 0
    _require_same_config(config, runtime)
    if runtime.is_main:
        folder.open(fresh)
    runtime.collectives.all_gather(torch.zeros(1), "opening of the run folder")
    log_to_file(folder, runtime.rank)
    log.debug("rank %d of %d on %s, %s", runtime.rank, runtime.num_ranks, runtime.environment.host, runtime.device)

    federation = load_federation(config, runtime.prepares_data)
    module = build_model(config, federation.dataset)
    federation = federation.to(runtime.device, image_format(runtime.device, config.runtime.precision))
    saved = load_newest(folder.checkpoints, config.fingerprint()) if runtime.is_main else None
    completed, server_state = _restore(module, saved, runtime)
    phases = Phases(config, module.to(runtime.device), federation, runtime)
    phases.resume(completed, server_state, saved.clients if saved else ())
    _describe(config, runtime, federation, phases.module, folder, completed)

    tracker = _trackers(config, folder, completed, console) if runtime.is_main else NullTracker()
    try:
        done = train(Job(config, runtime, federation, phases, folder, tracker), completed)
    finally:
        tracker.close()
    # All ranks wait: torchrun ends everybody when the first one leaves, and rank 0 may still be writing a checkpoint.
    runtime.collectives.all_gather(torch.zeros(1), "end of the training")
    if done < config.rounds:
        if runtime.is_main:
            log.info(
                "stopped on %s after %d of %d rounds; start the same command again to go on",
                runtime.stop.reason or "a signal to another rank",  # whose name has not come here yet
                done,
                config.rounds,
            )
        return EXIT_STOPPED
    if runtime.is_main:
        write_model(folder.model, module.state_dict())
        summary = _summarize(config, runtime, folder)
        write_json(folder.summary, summary)
        print_summary(console, summary, folder.path)
    return 0


def _restore(module: nn.Module, saved: SavedState | None, runtime: Runtime) -> tuple[int, dict[str, Tensor]]:
    """Give every rank rank 0's model and server state: a checkpoint's, or the initial ones.

    Only rank 0 reads files, so that all ranks go on from the same round whatever each of them can see.
    """
    collectives = runtime.collectives
    header = torch.tensor([saved.round if saved else 0, len(saved.server) if saved else 0])
    completed, num_tensors = collectives.broadcast(header, "broadcast of the round").tolist()
    if saved is not None:
        module.load_state_dict(dict(saved.model))
        log.info("resuming after round %d", completed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(collectives.broadcast(tensor.to(runtime.device), f"broadcast of {name}"))
    server = _broadcast_tensors(saved.server if saved else {}, num_tensors, collectives, runtime.device)
    return int(completed), server


def _broadcast_tensors(tensors: Any, count: int, collectives: Collectives, device: torch.device) -> dict[str, Tensor]:
    """Named tensors of rank 0, of which the others do not know name, shape or dtype yet."""
    if not count:
        return {}
    text = json.dumps({name: [str(t.dtype), *t.shape] for name, t in sorted(tensors.items())}).encode()
    size = collectives.broadcast(torch.tensor([len(text)]), "broadcast of the server state")
    data = torch.zeros(int(size), dtype=torch.uint8)
    if collectives.rank == 0:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    forms = json.loads(bytes(collectives.broadcast(data, "broadcast of the server state").tolist()))
    result = {}
    for name, (dtype, *shape) in forms.items():
        empty = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        mine = tensors[name].to(device) if collectives.rank == 0 else empty
        result[name] = collectives.broadcast(mine, "broadcast of the server state")
    return result


def _agree(runtime: Runtime, mine: bool) -> bool:
    """Rank 0's answer."""
    return bool(runtime.collectives.broadcast(torch.tensor([int(mine)]), "start"))


def _require_same_config(config: Config, runtime: Runtime) -> None:
    """Also in what has no part in the result: ranks must agree on when to checkpoint, too."""
    everything = config.to_dict()
    del everything["data"]["root"], everything["cluster"]  # may differ between hosts
    digest = zlib.crc32(json.dumps(everything, sort_keys=True).encode())
    digests = runtime.collectives.all_gather(torch.tensor([digest]), "start")
    different = (digests != digests[0]).any(dim=1).nonzero().reshape(-1).tolist()
    if different:
        raise ValueError(
            f"ranks {different} were started with another config than rank 0: give every torchrun of the job the same "
            "file and overrides"
        )


def _trackers(config: Config, folder: RunFolder, completed: int, console: Console) -> Tracker:
    trackers: list[Tracker] = [MetricsFile(folder.metrics, completed)]
    if config.tracking.tensorboard:
        trackers.append(TensorBoard(folder.tensorboard, completed))
    trackers.append(ConsoleTracker(console, config.name, config.rounds, completed))
    return Trackers(trackers)


def _describe(
    config: Config,
    runtime: Runtime,
    federation: Federation,
    module: nn.Module,
    folder: RunFolder,
    completed: int,
) -> None:
    """What is about to run, on the console, in `config.yaml` and in `environment.json`."""
    hosts = _gather_text(f"{runtime.environment.host} {_device_name(runtime.device)}", runtime.collectives)
    if not runtime.is_main:
        return
    dataset = federation.dataset
    log.info(
        "%s: %d rounds of %d from %d clients; %s on %s %s, %d parameters; %d rank(s), %s",
        config.name,
        config.rounds,
        config.cohort_size(),
        len(federation.population),
        config.model.type,
        config.data.dataset.type,
        "x".join(map(str, dataset.input_shape)),
        sum(parameter.numel() for parameter in module.parameters()),
        runtime.num_ranks,
        runtime.backend if runtime.num_ranks > 1 else _device_name(runtime.device),
    )
    write_text(folder.config, config.to_yaml())
    if completed:
        _warn_of_other_code(folder)
    environment = {
        "command": sys.argv,
        "ranks": hosts,
        "backend": runtime.backend,
        "resumed_after_round": completed,
        "python": platform.python_version(),
        **{package: _version(package) for package in ("fedspec_dist", "torch", "torchvision", "numpy")},
        "cuda": torch.version.cuda if runtime.device.type == "cuda" else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **({"attackers": list(federation.attackers)} if federation.attackers else {}),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        **_git(),
    }
    write_json(folder.environment, environment)


def _warn_of_other_code(folder: RunFolder) -> None:
    """A run that goes on under other code or another torch is not the run that its first rounds belong to."""
    try:
        before = json.loads(folder.environment.read_text())
    except (OSError, ValueError):
        return
    now = {"torch": _version("torch"), "fedspec_dist": _version("fedspec_dist"), **_git()}
    for name, value in now.items():
        if before.get(name) not in (None, value):
            log.warning("resuming with %s %s; the rounds so far had %s", name, value, before[name])


def _git() -> dict[str, Any]:
    return git_state(Path(fedspec_dist.__file__).parent)


def _summarize(config: Config, runtime: Runtime, folder: RunFolder) -> dict[str, Any]:
    records = read(folder.metrics)
    scored = [record for record in records if record.get("test_accuracy") is not None]
    final = records[-1] if records else {}
    best = max(scored, key=lambda record: record["test_accuracy"], default={})
    return {
        "name": config.name,
        "status": "finished",
        "rounds": config.rounds,
        "final_test_accuracy": final.get("test_accuracy"),
        "final_test_loss": final.get("test_loss"),
        "best_test_accuracy": best.get("test_accuracy"),
        "best_round": best.get("round"),
        "seconds": sum(record.get("seconds_round", 0.0) for record in records),
        "bytes_exchanged": sum(record.get("bytes_exchanged", 0) for record in records),
        "ranks": runtime.num_ranks,
    }


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
