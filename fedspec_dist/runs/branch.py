"""Which checkpoint of which run a config's `init` names, found without torch."""

from __future__ import annotations

import json
from pathlib import Path

from fedspec_dist.config import Config, ConfigError, expand_home, load
from fedspec_dist.config.overrides import PHASE_SECTIONS
from fedspec_dist.runs.folder import RunFolder, checkpoints_in, round_of


def source_checkpoint(config: Config) -> Path:
    """The folder of the checkpoint.

    Raises:
        ConfigError: there is no such run, or no such round of it.
    """
    assert config.init is not None
    return _checkpoint(expand_home("init.run", config.init.run or ""), config.init.round)


def rounds_before(config: Config) -> int:
    """How many rounds the runs had that a config branches from."""
    return round_of(source_checkpoint(config)) if config.init is not None and config.init.run is not None else 0


def _checkpoint(folder: Path, number: int | None) -> Path:
    found = checkpoints_in(RunFolder(folder).checkpoints)
    if not found:
        raise ConfigError(f"init.run: {folder} has no checkpoints; allowed is the folder of a run that has some")
    if number is None:
        return found[0]
    for path in found:
        if round_of(path) == number:
            return path
    there = ", ".join(str(round_of(path)) for path in reversed(found))
    raise ConfigError(
        f"init.round: got {number}, but the checkpoints in {folder} are of the rounds {there} (checkpoint.keep says "
        "how many stay); allowed: one of these"
    )


def continued(run: Path, file: str | None, overrides: list[str]) -> tuple[str, list[str]]:
    """The config file and the overrides with which a run is carried on: its own, from its newest checkpoint.

    Of several phases, the last one goes on. `rounds=N` among the overrides is the number of further rounds.

    Raises:
        ConfigError: it is no run's folder, or has no checkpoint; or there is another config file.
    """
    if file is not None:
        raise ConfigError(f"--continue-from: takes the config of that run; leave out {file}")
    path = run / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"--continue-from: {run} has no config.yaml; allowed is the folder of a run")
    config = load(path)
    last = round_of(_checkpoint(run, None))
    # The folder's own init, if it is a branch, is gone from what goes on.
    init = [f"init={{run: {str(run)!r}, round: {last}, weights: null, strict: true}}"]
    if not config.phases:
        return str(path), [*init, *overrides]
    stated = config.to_dict()
    sections = {key: config.phases[-1].model_dump()[key] for key in PHASE_SECTIONS}
    rounds = next((pair.partition("=")[2] for pair in reversed(overrides) if pair.startswith("rounds=")), None)
    number = int(rounds) if rounds and rounds.isdecimal() else stated["phases"][-1]["rounds"]
    phases = f"phases={json.dumps([{**sections, 'rounds': number}])}"
    return str(path), [
        *init,
        phases,
        f"rounds={number}",
        *(pair for pair in overrides if not pair.startswith("rounds=")),
    ]
