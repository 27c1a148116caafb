"""Which settings do not go together, and why. Everything that is not refused here runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedspec_dist.overrides import ConfigError


@dataclass(frozen=True)
class Rule:
    """`refuses(phase, config)` is true of a phase that cannot run; `key` is the setting to change, within the phase."""

    key: str
    refuses: Callable[[Any, Any], bool]
    reason: str


RULES = [
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
            f"clients_per_round: got {config.cohort_size()}, but data.partition.clients is {population}; "
            f"allowed: at most {population}"
        )
    if config.runtime.backend == "nccl" and config.runtime.device == "cpu":
        raise ConfigError("runtime.backend: got 'nccl' with runtime.device 'cpu'; allowed on CPUs: gloo, auto")
    for number, phase in enumerate(config.schedule()):
        for rule in RULES:
            if rule.refuses(phase, config):
                prefix = f"phases.{number}." if config.phases else ""
                raise ConfigError(f"{prefix}{rule.key}: {rule.reason}")
