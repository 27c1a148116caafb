"""From defaults, a file and what was typed to a checked config."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedspec_dist.config.files import ConfigError, read, shortened, shown, split
from fedspec_dist.config.messages import explain
from fedspec_dist.config.overrides import Typed, expand_phases, merge, refuse_overruled, uniform
from fedspec_dist.config.rules import check_combinations
from fedspec_dist.config.schema import DEFAULTS, Config
from fedspec_dist.config.trees import named
from fedspec_dist.config.unused import refuse_unused

_MAX_PROBLEMS = 10


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of a file (the embedded default without one) with `key=value` overrides; imports its plugins.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a wrong value, an impossible combination, an override
            that nothing of the run would heed.
    """
    given = uniform(read(Path(path))) if path is not None else {}
    pairs = [split(override) for override in overrides]
    # First of all: which parameters a method has decides below what becomes of them.
    early: dict[str, Any] = {key: given[key] for key in ("plugins", "model") if key in given}
    _import_plugins(_laid(early, Typed([p for p in pairs if _top(p) in early or _top(p) in ("plugins", "model")])))
    typed = Typed(pairs)
    raw = _laid(given, typed)
    expand_phases(raw, rounds_given="rounds" in given or "rounds" in typed.tree)
    refuse_overruled(raw, typed)
    config = validate(raw)
    refuse_unused(config, typed.keys())
    return config


def _top(pair: tuple[str, Any]) -> str:
    return pair[0].split(".")[0]


def _laid(given: dict[str, Any], typed: Typed) -> dict[str, Any]:
    raw = deepcopy(DEFAULTS)
    merge(raw, given)
    typed.lay_over(raw)
    return raw


def validate(raw: dict[str, Any]) -> Config:
    """Check a complete mapping (defaults merged in).

    Raises:
        ConfigError: naming the keys that are wrong, ten of them at most.
    """
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        lines = [explain(item, raw) for item in error.errors(include_url=False)[:_MAX_PROBLEMS]]
        if more := error.error_count() - len(lines):
            lines.append(f"and {more} more")
        raise ConfigError("\n".join(lines)) from None
    check_combinations(config)
    return config


def _import_plugins(raw: dict[str, Any]) -> None:
    """A module adds its own methods to the tables of `fedspec_dist.config.methods` when it is imported.

    In the current folder Python itself looks first or, with PYTHONSAFEPATH, not at all; here it does so last.
    """
    names = raw["plugins"]
    model = named(raw.get("model"))
    by_path = isinstance(model, dict) and model.get("type") == "module"
    if (names or by_path) and os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    for name in names if isinstance(names, list) else []:
        try:
            import_module(str(name))
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {shortened(str(error))}"
            raise ConfigError(
                f"plugins: {shown(name)} could not be imported ({reason}); allowed: modules that python finds, in "
                "the folder from which the command is started or on PYTHONPATH",
                everywhere=False,
            ) from error
