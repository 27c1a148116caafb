"""Which settings do not go together, and why. Everything that is not refused here runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedspec_dist.methods import LOCAL_ALGORITHMS
from fedspec_dist.overrides import ConfigError


@dataclass(frozen=True)
class Rule:
    """`refuses(phase, config)` is true of a phase that cannot run; `key` is the setting to change, within the phase."""

    key: str
    refuses: Callable[[Any, Any], bool]
    reason: str


# Local methods whose update is a sum of gradient steps, possibly pulled to the anchor: what FedNova normalises.
_STATEFUL_MEANS = {"feddyn", "feddc"}
_LEARNED_WEIGHTS = {"feddisco", "fedawa", "fedlaw"}
_WITH_MEMORY = {"momentum", "adagrad", "adam", "yogi"}
_SMALLEST_LR = 1e-30
_ON_FEATURES = {"moon", "feddecorr", "fedrcl"}
_WITHOUT_BLOCKS = {"mlp", "cnn", "cnn8k", "cnn23k", "cnn207k", "lenet"}


def _shrinks(phase: Any) -> bool:
    return phase.server.aggregator.type == "fedlws" or phase.server.weights.type == "fedlaw"


RULES = [
    Rule(
        "local.algorithm",
        lambda phase, _: phase.local.algorithm.type == "fednova" and phase.server.aggregator.type != "fednova",
        "got 'fednova', whose other half is server.aggregator: fednova; without it this is FedAvg (or, with mu, "
        "FedProx): name that, or add the aggregator",
    ),
    Rule(
        "server.aggregator",
        lambda phase, _: phase.server.aggregator.type == "fednova" and phase.local.algorithm.type in _STATEFUL_MEANS,
        "got 'fednova' with a local.algorithm whose server adds the clients' mean drift, which is of whole updates and "
        "does not fit normalised ones; allowed with feddyn and feddc: any other aggregator",
    ),
    Rule(
        "local.momentum",
        lambda phase, _: (
            phase.server.aggregator.type == "fednova"
            and phase.local.momentum > 0
            and getattr(phase.local.algorithm, "mu", 0) > 0
            and phase.local.algorithm.type in ("fednova", "fedprox")
        ),
        "got a momentum together with mu > 0 and server.aggregator: fednova: the normaliser of a step is known for one "
        "of them only; allowed: momentum 0, or mu 0",
    ),
    Rule(
        "server.aggregator",
        lambda phase, config: phase.server.aggregator.type == "inco" and config.model.type in _WITHOUT_BLOCKS,
        "got 'inco', which needs stages of residual blocks; allowed with it: model resnet20",
    ),
    Rule(
        "server.weights",
        lambda phase, _: (
            phase.server.aggregator.type in ("median", "trimmed_mean") and phase.server.weights.type in _LEARNED_WEIGHTS
        ),
        "got a weighting with an aggregator that ignores weights; allowed with median and trimmed_mean: uniform, "
        "samples (which are ignored)",
    ),
    Rule(
        "server.optimizer",
        lambda phase, _: _shrinks(phase) and phase.server.optimizer.type in _WITH_MEMORY,
        "got one that remembers or rescales directions with fedlws or fedlaw, which shrink the model: the shrinking "
        "would be repeated or rescaled like a gradient; allowed with them: sgd",
    ),
    Rule(
        "server.optimizer",
        lambda phase, _: phase.local.algorithm.type in _STATEFUL_MEANS and phase.server.optimizer.type in _WITH_MEMORY,
        "got one that remembers or rescales directions with feddyn or feddc, whose direction holds the sum of all "
        "earlier drifts: it would be summed twice, and diverges; allowed with them: sgd",
    ),
    Rule(
        "server.filter",
        lambda phase, _: phase.server.aggregator.type == "fedlws" and phase.server.filter.type != "none",
        "got a filter with server.aggregator: fedlws, whose direction holds the shrinking of the model, not the update "
        "alone; allowed with it: none",
    ),
    Rule(
        "server.weights",
        lambda phase, _: phase.server.aggregator.type == "fedlws" and phase.server.weights.type == "fedlaw",
        "got 'fedlaw' with server.aggregator: fedlws: the model would be shrunk twice; allowed with fedlws: any other",
    ),
    Rule(
        "server.aggregator.max_tau",
        lambda phase, _: (
            phase.server.aggregator.type == "fedlws"
            and phase.server.aggregator.max_tau < phase.server.aggregator.min_tau
        ),
        "got less than min_tau; allowed: at least min_tau",
    ),
    Rule(
        "local.algorithm",
        lambda phase, config: (
            phase.local.algorithm.type in _ON_FEATURES
            and getattr(config.model, "hidden", None) == []
            and (config.model.projection is None or phase.local.algorithm.type == "fedrcl")
        ),
        "got a method that acts on learned features with a linear model, which has none; allowed: model.hidden with at "
        "least one layer",
    ),
    Rule(
        "local.algorithm.eta",
        lambda phase, _: (
            phase.local.algorithm.type == "fedsam"
            and not phase.local.algorithm.adaptive
            and phase.local.algorithm.eta != LOCAL_ALGORITHMS["fedsam"].parameters["eta"][1]
        ),
        "got a value that only the adaptive ascent uses; set local.algorithm.adaptive: true, or leave eta out",
    ),
    Rule(
        "local.algorithm.filter_ascent",
        lambda phase, _: getattr(phase.local.algorithm, "filter_ascent", False) and phase.filter.type == "none",
        "got true without a filter; choose one with filter.type, or leave filter_ascent out",
    ),
    Rule(
        "local.algorithm.mu",
        lambda phase, _: (
            phase.server.aggregator.type == "fednova"
            and phase.local.algorithm.type in ("fednova", "fedprox")
            and phase.local.lr * phase.local.algorithm.mu >= 2
        ),
        "got a pull with local.lr * mu >= 2, which steps past the global model and further: FedNova's normaliser "
        "may be zero; allowed: mu below 2 / local.lr",
    ),
    Rule(
        "local.lr_decay",
        lambda phase, config: phase.local.lr * phase.local.lr_decay ** (config.rounds - 1) < _SMALLEST_LR,
        f"got a decay that takes local.lr below {_SMALLEST_LR:g} in the last round, where float32 ends; allowed: one "
        "nearer to 1",
    ),
    Rule(
        "server.aggregator.damping",
        lambda phase, _: (
            phase.server.aggregator.type == "fipa"
            and phase.server.aggregator.convention == "released"
            and phase.server.aggregator.damping == 0
        ),
        "got 0 with convention 'released', whose update is proportional to it: the model would never move; give "
        "damping > 0, or convention: exact",
    ),
]


def check_combinations(config: Any) -> None:
    """`config` is a `Config` whose every key is sound by itself.

    Raises:
        ConfigError: the first setting that does not go with the others.
    """
    population = config.data.partition.clients
    if config.cohort_size() > population:
        raise ConfigError(
            f"clients_per_round: got {config.clients_per_round:g}, but data.partition.clients is {population}; "
            f"allowed: at most {population}"
        )
    if config.runtime.backend == "nccl" and config.runtime.device == "cpu":
        raise ConfigError("runtime.backend: got 'nccl' with runtime.device 'cpu'; allowed on CPUs: gloo, auto")
    if config.runtime.precision == "tf32" and config.runtime.device == "cpu":
        raise ConfigError("runtime.precision: got 'tf32' with runtime.device 'cpu'; allowed on CPUs: float32")
    if config.runtime.precision == "tf32" and config.runtime.deterministic:
        raise ConfigError(
            "runtime.precision: got 'tf32', which types of GPUs round to in ways of their own, with "
            "runtime.deterministic; allowed with it: float32"
        )
    for number, phase in enumerate(config.schedule()):
        for rule in RULES:
            if rule.refuses(phase, config):
                prefix = f"phases.{number}." if config.phases else ""
                raise ConfigError(f"{prefix}{rule.key}: {rule.reason}")
