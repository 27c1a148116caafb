"""The training loop: one federated round after the other, to the last or to a request to stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedspec_dist.config import Config
from fedspec_dist.config.methods import headline_of
from fedspec_dist.core.draws import keyed
from fedspec_dist.distributed.collectives import bits_sum, checksum
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.rounds.checkpoint import SavedState, save
from fedspec_dist.rounds.divergence import require_agreement, server_fault
from fedspec_dist.rounds.evaluation import evaluate, evaluate_clients, over_clients
from fedspec_dist.rounds.federation import Federation
from fedspec_dist.rounds.local import share_results, train_clients
from fedspec_dist.rounds.phases import Phases
from fedspec_dist.rounds.sampling import reporting, sample_cohort
from fedspec_dist.rounds.stage import Stage
from fedspec_dist.rounds.timing import Clock, share_totals
from fedspec_dist.runs.folder import RunFolder
from fedspec_dist.runs.identity import Identity
from fedspec_dist.runs.trackers.metrics import ClientTracker, Tracker


@dataclass(frozen=True)
class Job:
    """All that a run works with."""

    config: Config
    runtime: Runtime
    federation: Federation
    phases: Phases
    folder: RunFolder
    tracker: Tracker
    identity: Identity = field(default_factory=Identity)  # of the data and the sources
    client_tracker: ClientTracker = field(default_factory=ClientTracker)


def train(job: Job, completed: int) -> int:
    """Rounds `completed + 1` to the last. Returns the number of rounds now completed: fewer than asked for when
    somebody requested a stop. A checkpoint holds them in either case.

    Every rank runs this function; the comments say where ranks wait for each other.
    """
    config, runtime, federation = job.config, job.runtime, job.federation
    collectives = runtime.collectives
    everywhere = checksum(
        [torch.from_numpy(np.concatenate([*federation.clients, [len(c) for c in federation.clients]]))]
    )
    saved = completed
    while completed < job.phases.last:
        index = completed
        clock = Clock(runtime.device)
        bytes_before = collectives.bytes_sent

        # Which methods, which clients, who trains them: every rank works it out alike, without a word exchanged.
        stage = job.phases.enter(index)
        sampled = sample_cohort(config, index, federation.population)
        cohort = reporting(config, index, sampled)
        loads = stage.loads(index, cohort)
        plan = stage.plan(loads, runtime.num_ranks)
        mine = plan[runtime.rank]

        # All ranks wait, if clients keep anything: it comes from their home ranks.
        states = stage.states.fetch(cohort, plan)
        clock.lap("exchange")

        # Local training. No rank waits; a rank without clients goes straight on.
        work = [(cohort[p], loads[p]) for p in mine]
        sent = stage.sent(index)
        local = train_clients(config, runtime, federation, stage, sent, work, states)
        clock.lap("train")

        # All ranks wait: how each client fared, and whether a request to stop ended somebody's training half-way.
        clients = stage.clients(index, cohort, loads)
        report = share_results(local, cohort, clients, plan, stage.max_rank, collectives)
        clock.lap("wait")
        shared, buffers = stage.theta[: stage.layout.num_shared], sent.buffers
        if report.stopped:
            stage.move(shared, buffers)
            break
        kept = report.finite(config.runtime.on_nonfinite, index + 1, partial(server_fault, shared, stage.phase))

        # All ranks wait: what clients keep goes home; rows of own clients become own columns of all clients.
        diagnostics: dict[str, float] = {}
        if kept:
            stage.states.store(cohort, plan, kept, local.states)
            facts = report.facts(kept)
            rows = local.of([place for place, p in enumerate(mine) if p in kept], bool(stage.max_rank))
            matrices = stage.server.exchange(rows, facts, shared)
            clock.lap("exchange")
            # All ranks wait: sums over column blocks, then the slices of the new model.
            with runtime.stop.uncut(f"the server's part of round {index + 1}"):
                shared, diagnostics = stage.server.step(shared, matrices, index)
            buffers = with_mean(buffers, stage.server.buffers)
        stage.move(shared, buffers)
        clock.lap("aggregate")
        completed += 1
        del local  # whose rows, like the matrices, are as large as all updates together
        if kept:
            del rows, matrices

        # All ranks wait: the new model on each rank's blocks of the test set.
        scores: dict[str, float] = {}
        if completed % config.eval.every == 0 or completed == job.phases.last:
            scores = test(job, stage, completed)
        clock.lap("eval")

        # All ranks wait: times, bytes, requests to stop, whether all have the same. Rank 0 writes the round down.
        known = everywhere if buffers is None else checksum([everywhere, bits_sum(buffers)])
        checks = stage.server.checks(stage.theta, known)
        totals = share_totals(clock, collectives.bytes_sent - bytes_before, bool(runtime.stop), checks, collectives)
        require_agreement(totals.checks, completed)
        record = {
            "round": completed,
            "phase": job.phases.number(index),
            "cohort": cohort,
            **({"clients_dropped": len(sampled) - len(cohort)} if config.dropout else {}),
            **({"attackers": [c for c in cohort if c in federation.attackers]} if federation.attackers else {}),
            **report.metrics(kept),
        }
        job.tracker.log({**record, **scores, "lr": stage.lr(index), **totals.metrics, **diagnostics})
        if completed % config.checkpoint.every == 0 or completed == job.phases.last:
            checkpoint(job, stage, completed)
            saved = completed
        if totals.stopped:
            break
    if saved != completed:
        checkpoint(job, job.phases.enter(completed), completed)
    return completed


def test(job: Job, stage: Stage, completed: int) -> dict[str, float]:
    """The metrics of the model after so many rounds; every rank calls it. Those of each client go to a file."""
    config, federation, runtime = job.config, job.federation, job.runtime
    module, dataset, block_size = job.phases.module, federation.dataset, config.eval.batch_size

    def draws(purpose: str) -> Callable[[int], AbstractContextManager[None]]:
        return partial(keyed, runtime.device, config.seed, purpose, completed)

    scores: dict[str, float] = {}
    if "global" in config.eval.on:
        found = evaluate(module, stage.task, dataset.test, block_size, runtime.collectives, draws("evaluation"))
        scores |= {f"test_{name}": value for name, value in found.items()}
    if federation.held_out is not None:
        found = evaluate(module, stage.task, federation.held_out, block_size, runtime.collectives, draws("validation"))
        scores |= {f"val_{name}": value for name, value in found.items()}
    if "clients" in config.eval.on:
        examples, owned = federation.own_samples
        with stage.shown(stage.sent(completed)) as show:
            each = evaluate_clients(
                module, stage.task, examples, owned, show, block_size, runtime.collectives, draws("clients")
            )
        job.client_tracker.log(completed, {c: {"num_samples": len(owned[c]), **row} for c, row in each.items()})
        scores |= over_clients(each, headline_of(config.task.type))
    return scores


def with_mean(buffers: Tensor | None, mean: Tensor | None) -> Tensor | None:
    """What is averaged of the buffers `[size]` takes the values of its mean `[n]`; counts stay."""
    if buffers is None or mean is None:
        return buffers
    return torch.cat([mean, buffers[len(mean) :]])


def checkpoint(job: Job, stage: Stage, completed: int) -> None:
    """Every rank gives its slices of the server's state and its clients'; rank 0 writes while the others go on."""
    server, clients = stage.server.memory.full(), stage.states.chunks()
    if job.runtime.is_main:
        job.folder.check()
        model = job.phases.module.state_dict()
        fingerprint, phases = job.config.fingerprint(), job.phases
        began = phases.first, phases.first_phase
        state = SavedState(completed, fingerprint, model, server, clients, job.identity, *began)
        save(job.folder.checkpoints, state, job.config.checkpoint.keep)
    else:
        for _ in clients:  # what is sent here, rank 0 receives in `save`
            pass
