"""Whole runs on a tiny problem, inside the test's process or a rank of the harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedspec_dist.config import Config, load
from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.processes.environment import Environment
from fedspec_dist.processes.gpus import image_format
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.processes.stop import StopRequest
from fedspec_dist.rounds.branch import Beginning, beginning
from fedspec_dist.rounds.checkpoint import load_newest
from fedspec_dist.rounds.federation import suit
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.loop import Job, train
from fedspec_dist.rounds.making import build_model
from fedspec_dist.rounds.phases import Phases
from fedspec_dist.runs.folder import RunFolder, write_text
from fedspec_dist.runs.identity import Identity
from fedspec_dist.runs.trackers.metrics import ClientsFile, ClientTracker

# Six clients of different sizes, three a round, two or more batches each.
TINY = (
    "name=tiny",
    "data={dataset: synthetic, shape: [1, 8, 8], num_classes: 3, num_train: 90, num_test: 30}",
    "data.partition={type: quantity_skew, clients: 6, sigma: 0.5, min_size: 8}",
    "model={type: cnn, width: 2}",
    "clients_per_round=3",
    "rounds=2",
    "local.epochs=1",
    "local.batch_size=5",
    "filter=none",
    "checkpoint.every=2",
    "runtime.device=cpu",
)


@dataclass
class Recorder:
    """A tracker that keeps everything, and asks the run to stop after some rounds: as a signal would, in the next."""

    stop: StopRequest
    rounds: int | None
    records: list[dict[str, Any]] = field(default_factory=list)

    def log(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))
        if record["round"] == self.rounds:
            self.stop.reason = "the test"

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Finished:
    model: dict[str, Tensor]
    records: list[dict[str, Any]]

    def results(self) -> list[dict[str, Any]]:
        """The records without what depends on machine and ranks."""
        measured = ("seconds_", "rank_imbalance", "bytes_exchanged")
        return [{k: v for k, v in record.items() if not k.startswith(measured)} for record in self.records]


def tiny(overrides: Sequence[str] = ()) -> Config:
    # Steps take the place of epochs, of which TINY then must not say how many.
    in_steps = any(override.startswith(("local.steps=", "local.schedule=")) for override in overrides)
    in_phases = any(override.startswith("phases=") for override in overrides)
    left_out = ("local.epochs=",) * in_steps + ("rounds=",) * in_phases
    return load(None, [*(key for key in TINY if not key.startswith(left_out or ("-",))), *overrides])


def run_job(
    config: Config,
    folder: Path,
    collectives: Collectives | None = None,
    rounds: int | None = None,
    spoil: Mapping[int, float] | None = None,
) -> Finished:
    """Train to the end, or to `rounds`; goes on from the folder's newest checkpoint.

    `spoil` gives training images, by position, a pixel of another value.
    """
    collectives = collectives or SingleProcess()
    rank, num_ranks = collectives.rank, collectives.num_ranks
    environment = Environment(rank, num_ranks, rank, num_ranks, launched=True)
    device = torch.device("cuda" if config.runtime.device == "cuda" else "cpu")
    runtime = Runtime(environment, device, "gloo", collectives, StopRequest())
    federation = load_federation(config, prepares=True)
    module = build_model(config, federation.dataset).to(device)
    federation = suit(config, federation, module).to(device, image_format(device, config.runtime.precision))
    for position, value in (spoil or {}).items():
        federation.dataset.train.inputs[0][position, 0, 0, 0] = value
    run_folder = RunFolder(folder)
    saved = load_newest(run_folder.checkpoints, config.fingerprint())
    if saved is not None:
        start, completed = Beginning.of(saved), saved.round
    else:
        start = beginning(config, module, Identity())
        completed = start.first
    if start.model:
        module.load_state_dict(dict(start.model))
    phases = Phases(config, module, federation, runtime, start.first, start.first_phase)
    phases.resume(completed, start.server, start.clients, start.carries_on)
    recorder = Recorder(runtime.stop, rounds)
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(run_folder.config, config.to_yaml())
    clients = ClientsFile(run_folder.clients, completed) if rank == 0 else ClientTracker()
    train(Job(config, runtime, federation, phases, run_folder, recorder, client_tracker=clients), completed)
    # As in a run: rank 0 may still be writing the checkpoint that the others read next.
    collectives.all_gather(torch.zeros(1), "end of the training")
    model = {name: tensor.cpu().clone() for name, tensor in module.state_dict().items()}
    return Finished(model, recorder.records)
