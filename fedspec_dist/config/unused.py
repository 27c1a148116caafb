"""What was typed and has no effect, since another setting takes its place, is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedspec_dist.config.files import ConfigError
from fedspec_dist.config.methods import FILTER_COMMON
from fedspec_dist.config.schema import Config, Phase


@dataclass(frozen=True)
class Idle:
    """A key without effect in a phase of which `is_idle(phase, config)` is true."""

    keys: tuple[str, ...]
    is_idle: Callable[[Phase, Config], bool]
    reason: str


def _without_filter(key: str) -> Idle:
    idle_keys = tuple(f"{key}.{name}" for name in FILTER_COMMON)
    return Idle(
        idle_keys, lambda phase, _: phase.at(key).type == "none", f"{key} is none; leave it out, or name a filter"
    )


def _with_schedule(key: str) -> Idle:
    return Idle(
        (f"{key}.ratio",),
        lambda phase, _: getattr(phase.at(key), "schedule", None) is not None,
        f"{key}.schedule takes its place; leave one of them out, or give {key}.schedule=null",
    )


IDLE = [
    Idle(
        ("local.epochs",),
        lambda phase, _: bool(phase.local.schedule),
        "local.schedule takes its place; leave one of them out, or give local.schedule=[]",
    ),
    Idle(
        ("local.epochs",),
        lambda phase, _: phase.local.steps is not None,
        "local.steps takes its place; leave one of them out, or give local.steps=null",
    ),
    Idle(
        ("clients.attack.fraction",),
        lambda _, config: config.clients.attack.type == "none",
        "clients.attack is none; leave it out, or name an attack",
    ),
    *(rule(key) for rule in (_without_filter, _with_schedule) for key in ("filter", "server.filter")),
]


def refuse_unused(config: Config, typed: Sequence[tuple[str, ...]]) -> None:
    """`typed` are the paths of single values that somebody typed for this very run; a file may state more than is used.

    Raises:
        ConfigError: the first that no phase uses.
    """
    phases = list(enumerate(config.schedule()))
    for path in typed:
        own = path[0] == "phases" and len(path) > 2 and path[1].isdigit()
        key = ".".join(path[2:] if own else path)
        concerned = [phase for number, phase in phases if not own or number == int(path[1])]
        for idle in IDLE:
            if any(key == known or key.startswith(f"{known}.") for known in idle.keys) and all(
                idle.is_idle(phase, config) for phase in concerned
            ):
                raise ConfigError(f"{'.'.join(path)}: is not used, since {idle.reason}")
