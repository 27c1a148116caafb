"""Where a run starts that does not start from random numbers: another run's checkpoint, or a file of weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedspec_dist.config import Config, ConfigError, expand_home, load
from fedspec_dist.rounds.checkpoint import SavedState, load_checkpoint
from fedspec_dist.rounds.phases import phase_of_round
from fedspec_dist.runs.branch import source_checkpoint

log = logging.getLogger(__name__)

_MAX_NAMED = 10


@dataclass(frozen=True)
class Beginning:
    """What a run has before its first round. `first` rounds came before, in the runs that it branched from."""

    first: int = 0
    model: Mapping[str, Tensor] = field(default_factory=dict)  # empty: the random one of the seed
    # What server and clients remember, where the run goes on with the methods of its source.
    server: Mapping[str, Tensor] = field(default_factory=dict)
    clients: Iterable[Mapping[int, Tensor]] = ()
    carries_on: bool = False


def beginning(config: Config, module: nn.Module) -> Beginning:
    """From the config's `init`; rank 0 reads it, once, before the first checkpoint of the run's own.

    Raises:
        ValueError: what it names is not there, is damaged, or is of another model.
    """
    init = config.init
    if init is None:
        return Beginning()
    if init.weights is not None:
        return Beginning(model=_weights(expand_home("init.weights", init.weights), module, init.strict))
    source = _checkpoint(config)
    _require_fit("init.run", str(init.run), module.state_dict(), source.model, strict=True)
    carries_on = _same_methods(config, source)
    log.info(
        "starting from round %d of %s%s",
        source.round,
        init.run,
        ", with what its server and clients remember" * carries_on,
    )
    if not carries_on:
        return Beginning(source.round, source.model)
    return Beginning(source.round, source.model, source.server, source.clients, carries_on=True)


def _checkpoint(config: Config) -> SavedState:
    path = source_checkpoint(config)
    try:
        return load_checkpoint(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"init.run: {path} cannot be read: {error}; name another round of that run with init.round, or another run"
        ) from error


def _same_methods(config: Config, source: SavedState) -> bool:
    """Whether the first phase here is the one that the source was in, but for its number of rounds."""
    assert config.init is not None
    folder = expand_home("init.run", config.init.run or "")
    try:
        before = load(folder / "config.yaml")
    except ConfigError as error:
        raise ValueError(f"init.run: the config.yaml in {folder} cannot be read: {error}") from error
    if before.seed != config.seed or before.data != config.data or before.task != config.task:
        return False
    schedule = before.schedule()
    last = schedule[phase_of_round(schedule, source.round - source.first - 1)]
    left, right = (phase.model_dump(exclude={"rounds"}) for phase in (last, config.schedule()[0]))
    return left == right and before.model == config.model


def _weights(path: Path, module: nn.Module, strict: bool) -> dict[str, Tensor]:
    """The module's whole state, with what the file has in its place."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"init.weights: cannot read {path}: {error}; allowed is a safetensors file") from error
    own = module.state_dict()
    _require_fit("init.weights", str(path), own, found, strict)
    taken = {name: found[name] for name in own if name in found}
    if len(taken) < len(own) or len(taken) < len(found):
        log.warning(
            "init.weights: %d of the model's %d tensors are taken from %s, and %d of its own are left over",
            len(taken),
            len(own),
            path,
            len(found) - len(taken),
        )
    return {**own, **taken}


def _require_fit(key: str, where: str, own: Mapping[str, Tensor], found: Mapping[str, Tensor], strict: bool) -> None:
    shared = [name for name in own if name in found]
    problems = [
        f"{name} has shape {list(found[name].shape)}, not {list(own[name].shape)}"
        for name in shared
        if found[name].shape != own[name].shape
    ]
    if strict:
        problems += [f"{name} is missing" for name in own if name not in found]
        problems += [f"{name} is left over" for name in found if name not in own]
    elif not shared:
        problems.append("no name is one of the model's")
    if problems:
        more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        remedy = "the weights of this model" + (", or init.strict: false" if key == "init.weights" and strict else "")
        raise ValueError(f"{key}: {where} does not fit: {'; '.join(problems[:_MAX_NAMED])}{more}; allowed: {remedy}")
