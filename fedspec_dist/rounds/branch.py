"""Where a run starts that does not start from random numbers: another run's checkpoint, or a file of weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedspec_dist.config import Config, ConfigError, expand_home, load
from fedspec_dist.rounds.checkpoint import MODEL, SavedState, load_checkpoint
from fedspec_dist.rounds.phases import phase_of_round
from fedspec_dist.runs.branch import source_checkpoint
from fedspec_dist.runs.identity import ChangedError, Identity, differences

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
    first_phase: int = 0  # phases that came before
    accepted: Sequence[str] = ()  # what changed since, in words

    @staticmethod
    def of(saved: SavedState) -> Beginning:
        """Of a run that goes on from a checkpoint of its own."""
        return Beginning(saved.first, saved.model, saved.server, saved.clients, first_phase=saved.first_phase)


def beginning(config: Config, module: nn.Module, identity: Identity, accept_changes: bool = False) -> Beginning:
    """From the config's `init`; rank 0 reads it, once, before the first checkpoint of the run's own.

    Raises:
        ValueError: what it names is not there, is damaged, or is of another model, task or data set.
        ChangedError: methods go on whose sources changed since, and nobody accepts it.
    """
    init = config.init
    if init is None:
        return Beginning()
    if init.weights is not None:
        return Beginning(model=_weights(expand_home("init.weights", init.weights), module, init.strict))
    path = source_checkpoint(config)
    source, before = _load(path), _source_config(config)
    _require_same_work(config, before, source, identity.data, path)
    _require_fit("init.run", str(init.run), module.state_dict(), source.model, strict=True)
    schedule = before.schedule()
    number = phase_of_round(schedule, source.round - source.first - 1)
    carries_on = _same_methods(config, before, number)
    log.info(
        "starting from round %d of %s, with %s",
        source.round,
        init.run,
        "what its server and clients remember"
        if carries_on
        else "its model alone: methods, model, seed or data are not all those of its last phase",
    )
    # To other methods it is the next phase, in which nobody remembers anything yet.
    phase = source.first_phase + number + (not carries_on)
    if not carries_on:
        return Beginning(source.round, source.model, first_phase=phase)
    accepted = _changed_plugins(source, identity, path, accept_changes)
    return Beginning(source.round, source.model, source.server, source.clients, True, phase, accepted)


def _changed_plugins(source: SavedState, now: Identity, path: Path, accept: bool) -> list[str]:
    """What changed in the plugins that both use."""
    then = source.identity.plugins if source.identity is not None else {}
    both = then.keys() & now.plugins.keys() - {"init"}  # which names where each of them began
    changed = differences(*(Identity(plugins={name: of[name] for name in both}) for of in (then, now.plugins)))
    if changed and not accept:
        raise ChangedError(
            f"init.run: since {path} was written this changed: {'; '.join(changed)}. Put it back, begin with the model "
            f"alone by init.weights: {path / MODEL}, or give --accept-changes, which goes on and writes that down"
        )
    return changed


def _load(path: Path) -> SavedState:
    try:
        return load_checkpoint(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"init.run: {path} cannot be read: {error}; name another round of that run with init.round, or another run"
        ) from error


def _source_config(config: Config) -> Config:
    assert config.init is not None
    folder = expand_home("init.run", config.init.run or "")
    try:
        return load(folder / "config.yaml")
    except ConfigError as error:
        raise ValueError(f"init.run: the config.yaml in {folder} cannot be read: {error}") from error


def _require_same_work(config: Config, before: Config, source: SavedState, content: str, path: Path) -> None:
    """Rounds go on only in the task and on the data of those before; wherever the data lie."""
    then = source.identity.data if source.identity is not None else ""
    other = then != content if then and content else before.data.dataset != config.data.dataset
    named = [("task", before.task.type, config.task.type, before.task != config.task)]
    named.append(("data.dataset", before.data.dataset.type, config.data.dataset.type, other))
    for key, old, new, differs in named:
        if differs:
            was = f"{old}, here it is {new}" if old != new else f"another {old}"
            raise ValueError(
                f"init.run: in {path} {key} was {was}; allowed is a run of the same. For its model alone, with rounds "
                f"counted from 1: init.weights: {path / MODEL}"
            )


def _same_methods(config: Config, before: Config, number: int) -> bool:
    """Whether the first phase here is the one that the source was in, but for its number of rounds."""
    left, right = (
        (
            phase.model_dump(exclude={"rounds"}),
            of.data.model_dump(exclude={"dataset", "root", "download"}),
            (of.seed, of.model, of.runtime.dtype),
        )
        for phase, of in ((before.schedule()[number], before), (config.schedule()[0], config))
    )
    return left == right


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
            "init.weights: %d of the model's %d tensors are taken from %s; drawn anew: %s; left over in the file: %s",
            len(taken),
            len(own),
            path,
            _some([name for name in own if name not in taken]),
            _some([name for name in found if name not in taken]),
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
        remedy = "the weights of this model" + (", or init.strict: false" if key == "init.weights" and strict else "")
        raise ValueError(f"{key}: {where} does not fit: {_some(problems, '; ')}; allowed: {remedy}")


def _some(names: Sequence[str], between: str = ", ") -> str:
    """The first ones, and how many more there are."""
    more = [f"and {len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return between.join([*names[:_MAX_NAMED], *more]) or "none"
