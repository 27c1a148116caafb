"""One run from start to finish: folder, data, model, resume, training, summary. Every rank runs `execute`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedspec_dist.config import Config
from fedspec_dist.core.failures import Kind, Origin, as_kind
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.processes.gpus import image_format
from fedspec_dist.processes.runtime import EXIT_DIVERGED, EXIT_STOPPED, Runtime
from fedspec_dist.rounds.account import accepted_changes, agree_on_identity, require_same_config, write_account
from fedspec_dist.rounds.branch import Beginning, beginning
from fedspec_dist.rounds.checkpoint import SavedState, load_newest, write_model
from fedspec_dist.rounds.divergence import no_result, num_contributing, server_fault
from fedspec_dist.rounds.federation import suit
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.loop import Job, train
from fedspec_dist.rounds.making import build_model
from fedspec_dist.rounds.phases import Phases
from fedspec_dist.rounds.results import best_of, by_phase
from fedspec_dist.runs.events import BRANCHED, RESUMED, STARTED, STOPPED, Events
from fedspec_dist.runs.folder import RunFolder, log_to_file, write_json
from fedspec_dist.runs.identity import Identity, accept_or_refuse, differences, settle
from fedspec_dist.runs.trackers.console import ConsoleTracker, print_summary
from fedspec_dist.runs.trackers.metrics import (
    ClientsFile,
    ClientTracker,
    MetricsFile,
    NullTracker,
    Tracker,
    Trackers,
    num_missing,
    read,
)
from fedspec_dist.runs.trackers.tensorboard import TensorBoard

log = logging.getLogger(__name__)


def execute(
    config: Config, runtime: Runtime, fresh: bool, console: Console, events: Events, accept_changes: bool = False
) -> int:
    """Run or resume; returns the exit code."""
    folder = RunFolder(config.run_folder())
    # Who asked for a fresh start wants one, not another each time that torchrun or SLURM starts the job again.
    fresh = fresh and not runtime.environment.restarts
    require_same_config(config, runtime)
    identity = agree_on_identity(config, runtime)
    summary, accepted = None, []
    if runtime.is_main and not fresh:
        accepted = settle(folder, lambda: identity, accept_changes)
        summary = folder.ended()
    if (ended := _agree(runtime, -1 if summary is None else _exit_code(summary))) >= 0:
        if runtime.is_main and summary is not None:
            print_summary(console, summary, folder.path)
            if accepted:
                log.warning("taken as it is, although since then this changed: %s", "; ".join(accepted))
            if mixed := summary.get("changes_accepted"):
                log.warning("its rounds were not all made with the same; accepted on the way: %s", "; ".join(mixed))
            _say_ended(summary, "has already")
        return ended
    if runtime.is_main:
        folder.open(fresh)
    try:
        return _work(config, runtime, folder, identity, accept_changes, console, events)
    finally:
        folder.close()


def _work(
    config: Config,
    runtime: Runtime,
    folder: RunFolder,
    identity: Identity,
    accept_changes: bool,
    console: Console,
    events: Events,
) -> int:
    """What a run does in its folder; returns the exit code."""
    if runtime.is_main:
        events.write(STARTED, ranks=runtime.num_ranks, headline=list(config.headline()))
    runtime.collectives.all_gather(torch.zeros(1), "opening of the run folder")
    log_to_file(folder, runtime.rank)
    log.debug("rank %d of %d on %s, %s", runtime.rank, runtime.num_ranks, runtime.environment.host, runtime.device)

    with as_kind(Kind.DATA):
        federation = load_federation(config, runtime.prepares_data, identity.data)
    if not identity.data:  # they have been downloaded
        identity = agree_on_identity(config, runtime)
    known = {"ids": federation.ids, "names": federation.names}
    if runtime.is_main and any(known.values()):
        write_json(folder.path / "clients.json", {key: value for key, value in known.items() if value is not None})
    module = build_model(config, federation.dataset)
    federation = suit(config, federation, module)
    federation = federation.to(runtime.device, image_format(runtime.device, config.runtime.precision))
    saved = load_newest(folder.checkpoints, config.fingerprint()) if runtime.is_main else None
    accepted = _accept(saved, identity, folder, accept_changes) if saved is not None else []
    if saved is not None:
        log.info("resuming after round %d", saved.round)
        start, completed = Beginning.of(saved), saved.round
    else:
        start = beginning(config, module, identity, accept_changes) if runtime.is_main else Beginning()
        accepted = [*start.accepted]
        completed = start.first
    start, completed = _share(module, start, completed, runtime)
    phases = Phases(config, module.to(runtime.device), federation, runtime, start.first, start.first_phase)
    phases.resume(completed, start.server, start.clients, start.carries_on)
    write_account(config, runtime, federation, phases.module, folder, completed, identity, accepted)
    if runtime.is_main and completed > start.first:
        events.write(RESUMED, round=completed)
    elif runtime.is_main and completed:
        events.write(BRANCHED, round=completed)

    tracker = _trackers(config, folder, completed, phases.last, console) if runtime.is_main else NullTracker()
    try:
        clients = ClientsFile(folder.clients, completed) if runtime.is_main else ClientTracker()
        done = train(Job(config, runtime, federation, phases, folder, tracker, identity, clients), completed)
    finally:
        tracker.close()
    # All ranks wait: torchrun ends everybody when the first one leaves, and rank 0 may still be writing a checkpoint.
    runtime.collectives.all_gather(torch.zeros(1), "end of the training")
    if done < phases.last:
        if runtime.is_main:
            by = runtime.stop.reason or "a signal to another rank"  # whose name has not come here yet
            events.write(STOPPED, by=by, round=done)
            log.info(
                "stopped on %s after %d of %d rounds; start the same command again to go on", by, done, phases.last
            )
        return EXIT_STOPPED
    code = 0
    if runtime.is_main:
        folder.check()
        write_model(folder.model, phases.module.state_dict())
        fault = server_fault(parameters_to_vector(phases.module.parameters()), config.schedule()[-1])
        summary = _summarize(config, runtime, folder, identity, phases, fault)
        write_json(folder.summary, summary)
        facts: dict[str, Any] = {"round": done}
        if "reason" in summary:
            facts |= {"origin": Origin.RESULT.value, "message": summary["reason"]}
        events.write(summary["status"], **facts)
        print_summary(console, summary, folder.path)
        _say_ended(summary, "has")
        code = _exit_code(summary)
    # All ranks wait until rank 0 has written everything: a launcher ends it when another one leaves with such a code.
    return _agree(runtime, code)


def _accept(saved: SavedState, identity: Identity, folder: RunFolder, accept: bool) -> list[str]:
    """What the checkpoint that was loaded says, which may not be the one that was looked at first; and what is gone."""
    since = f"round {saved.round}"
    changed = None if saved.identity is None else differences(saved.identity, identity)
    if changed is not None and (missing := num_missing(folder.metrics, saved.first, saved.round)):
        changed.append(f"{folder.metrics.name} has lost {missing} of the {saved.round - saved.first} rounds before")
    accepted = accept_or_refuse(folder, since, changed, accept)
    if accepted:
        log.warning("going on, although since %s this changed: %s", since, "; ".join(accepted))
    return accepted


def _share(module: nn.Module, start: Beginning, completed: int, runtime: Runtime) -> tuple[Beginning, int]:
    """Give every rank what rank 0 begins with: the model, what the server remembers, and how many rounds there were.

    Only rank 0 reads files, so that all ranks go on from the same round whatever each of them can see.
    """
    collectives = runtime.collectives
    began = [start.first, start.first_phase, start.carries_on]
    header = collectives.broadcast(torch.tensor([completed, len(start.server), *began]), "broadcast of the round")
    completed, num_tensors, *began = header.tolist()
    if start.model:
        _load_model(module, start.model, completed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(collectives.broadcast(tensor.to(runtime.device), f"broadcast of {name}"))
    server = _broadcast_tensors(start.server, num_tensors, collectives, runtime.device)
    first, phase, carries_on = began
    start = replace(start, first=first, first_phase=phase, server=server, carries_on=bool(carries_on))
    return start, int(completed)


def _load_model(module: nn.Module, model: Mapping[str, Tensor], completed: int) -> None:
    try:
        module.load_state_dict(dict(model))
    except RuntimeError as error:  # a plugin's model that was edited
        raise ValueError(
            f"the model of the checkpoint of round {completed} does not fit the model of this config: {error}. Start "
            "over with --fresh, or give this run another name="
        ) from error


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


def _agree(runtime: Runtime, mine: int) -> int:
    """Rank 0's answer."""
    return int(runtime.collectives.broadcast(torch.tensor([mine]), "agreement with rank 0"))


def _exit_code(summary: Mapping[str, Any]) -> int:
    return 0 if summary["status"] == "finished" else EXIT_DIVERGED


def _say_ended(summary: Mapping[str, Any], when: str) -> None:
    """That it finished the table says; that it did before, or that it diverged, needs a word."""
    if summary["status"] == "diverged":
        log.error("this run %s diverged: %s. --fresh starts it over", when, summary.get("reason"))
    elif when != "has":
        log.info("this run %s finished; --fresh starts it over", when)


def _trackers(config: Config, folder: RunFolder, completed: int, last: int, console: Console) -> Tracker:
    metrics = MetricsFile(folder.metrics, completed)
    folder.hold(folder.metrics, metrics.file)
    trackers: list[Tracker] = [metrics]
    if config.tracking.tensorboard:
        trackers.append(TensorBoard(folder.tensorboard, completed))
    trackers.append(ConsoleTracker(console, config.name, last, completed, config.headline()[0]))
    return Trackers(trackers)


def _summarize(
    config: Config, runtime: Runtime, folder: RunFolder, identity: Identity, phases: Phases, advice: str
) -> dict[str, Any]:
    records = read(folder.metrics)
    changes = accepted_changes(folder)
    reason = no_result(records, phases.module.state_dict(), advice)
    metric, direction = config.headline()
    final, best = records[-1] if records else {}, best_of(records, metric, direction)
    return {
        "name": config.name,
        "status": "diverged" if reason else "finished",
        **({"reason": reason} if reason else {}),
        "rounds": config.rounds,
        **({"rounds_before": phases.first} if phases.first else {}),
        f"final_{metric}": final.get(metric),
        **({"final_test_loss": final.get("test_loss")} if "test_loss" in final else {}),
        **{f"final_{key}": value for key, value in final.items() if key.startswith("client_")},  # of `eval.on: clients`
        f"best_{metric}": best.get(metric),
        "best_round": best.get("round"),
        "headline": {
            "metric": metric,
            "direction": direction,
            "final": final.get(metric),
            "best": best.get(metric),
            "best_round": best.get("round"),
        },
        "phases": by_phase(records, metric, direction),
        "clients_skipped": sum(record.get("clients_skipped", 0) for record in records),
        "rounds_without_clients": sum(num_contributing(record) == 0 for record in records),
        "seconds": sum(record.get("seconds_round", 0.0) for record in records),
        "bytes_exchanged": sum(record.get("bytes_exchanged", 0) for record in records),
        "ranks": runtime.num_ranks,
        "identity": identity.to_dict(),
        **({"changes_accepted": changes} if changes else {}),
    }
