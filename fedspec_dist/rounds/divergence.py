"""What is no result: numbers that are not finite, and ranks that disagree; the errors, and what is advised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedspec_dist.config import Phase
from fedspec_dist.core.failures import NonFiniteError, Origin

# No network that trains has a weight as large.
_LARGE_WEIGHT = 1e3
_CLIENTS = "Lower local.lr, or set local.clip_norm"


class DivergenceError(NonFiniteError):
    """A round with numbers that are not finite; `round_number` counts from 1."""

    def __init__(self, message: str, round_number: int) -> None:
        super().__init__(message)
        self.round_number = round_number


class NonFiniteUpdateError(DivergenceError):
    """A client's update, or what it sends or keeps besides, has a NaN or an infinity."""

    origin = Origin.CLIENT


class NonFiniteModelError(DivergenceError):
    """The server's step made a NaN or an infinity, or a model that no client can train, out of finite updates."""

    origin = Origin.SERVER


def server_fault(theta: Tensor, phase: Phase) -> str:
    """Why a model `[P]` was useless before any client had it; empty when that is not the server's doing.

    Clients whose updates are not finite may have been given a model that is finite and far too large.
    """
    lr = getattr(phase.server.optimizer, "lr", 1.0)  # one of a plugin may have none
    largest = float(theta.detach().abs().max()) if len(theta) else 0.0
    if lr <= 1 or not largest > _LARGE_WEIGHT >= largest / lr:  # with lr 1 the same updates would have done no harm
        return ""
    return (
        f"the server's steps have made entries up to {largest:.3g} in the model: lower server.optimizer.lr, which is "
        f"{lr:g}"
    )


def no_result(
    records: Sequence[Mapping[str, Any]],  # of metrics.jsonl
    state: Mapping[str, Tensor],  # the final model's
    advice: str,
) -> str:
    """Why a run that has done all its rounds has no result, and what to do; empty when it has one."""
    last = records[-1] if records else {}
    if records and all(num_contributing(record) == 0 for record in records):
        skipped = sum(record.get("clients_skipped", 0) for record in records)
        told = f"{skipped} updates were not finite and left out" if skipped else "no sampled client reported"
        remedy = advice or (f"{_CLIENTS}" if skipped else "Lower dropout, or raise clients_per_round")
        return f"nobody contributed to any of the {len(records)} rounds: {told}. {_sentence(remedy)}"
    broken = sorted(name for name, tensor in state.items() if not bool(tensor.isfinite().all()))
    if broken:
        return f"the final model is not finite ({broken[0]}). {_sentence(advice or _CLIENTS)}"
    if any(name.startswith("test_") and value is None for name, value in last.items()):
        return f"the loss or a metric of the final model on the test set is not finite. {_sentence(advice or _CLIENTS)}"
    if records and num_contributing(last) and last.get("train_loss") is None:
        return f"the clients' loss in the last round is not finite. {_sentence(advice or _CLIENTS)}"
    return ""


def num_contributing(record: Mapping[str, Any]) -> int:
    """Clients whose updates entered the model in a round."""
    return len(record.get("cohort", ())) - int(record.get("clients_skipped", 0))


def _sentence(advice: str) -> str:
    return f"{advice[:1].upper()}{advice[1:]}"


class RanksDisagreeError(ValueError):
    """What every rank works out alike came out differently."""


def require_agreement(checks: Tensor, round_number: int) -> None:
    """`checks [num_ranks, 2]` are all ranks' `FederatedServer.checks`.

    Raises:
        RanksDisagreeError: on every rank, before anything of the round is kept.
    """
    of_methods, of_model = checks.unbind(1)
    working = of_methods[of_methods >= 0]
    what = ""
    if len(working.unique()) > 1:
        what = "weights, coefficients or diagnostics of server.weights and server.aggregator"
    elif len(of_model.unique()) > 1:
        what = "a model or a partition"
    if what:
        raise RanksDisagreeError(
            f"after round {round_number} not all ranks have the same {what}. Every rank computes these for itself: a "
            "method of a plugin must draw from cohort.generator() or the global generators of torch, numpy or python, "
            "which are keyed (not from one that it seeds itself from the time), and must not depend on rank, host, "
            "time or a set's order"
        )
