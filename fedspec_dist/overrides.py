"""YAML files and `key=value` overrides, merged into one mapping; nothing here knows what the keys mean.

Except where a mapping names a method: `FAMILIES` says where, since naming another drops the parameters of the old one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from fedspec_dist import methods


class ConfigError(ValueError):
    """A config that cannot run; the message is for the person who typed it."""


# Where a bare name may stand for `{type: name}`.
FAMILIES = {tuple(key.split(".")): family for key, family in methods.FAMILIES.items()}

# What a phase may override.
PHASE_SECTIONS = ("trainable", "local", "filter", "server")

# Keys of `data` that belong to every data set; the others are parameters of the one that is named.
DATA_COMMON = ("dataset", "root", "download", "partition", "augment")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with two repairs: `1e-3` and `-.5` are numbers, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(f"{key!r}: a key is a name{key_node.start_mark}")
            if key in seen:
                raise ConfigError(f"{key}: given twice{key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a config: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys to values, got {type(content).__name__}")
    return content


def split(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r}: an override is key=value, for example local.lr=0.1")
    try:
        return key, yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: {text!r} is not a YAML value") from None


def named(value: Any) -> Any:
    """A bare name in the form of a mapping."""
    return {"type": value} if isinstance(value, str) else value


def merge(base: dict[str, Any], changes: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
    """Lay `changes` over `base` in place.

    A mapping that names another method (`type`, or `dataset` in `data`) drops the parameters of the old one,
    except those that the whole family shares.
    """
    for key, value in changes.items():
        where = (*path, str(key))
        old = base.get(key)
        if isinstance(old, dict) and where in FAMILIES:
            value = named(value)
        if isinstance(old, str) and isinstance(value, dict) and value.get("type", old) == old:
            old = base[key] = {"type": old}
        if isinstance(old, dict) and isinstance(value, Mapping):
            _drop_other_method(old, value, where)
            merge(old, value, where)
        else:
            base[key] = deepcopy(value)


def _drop_other_method(old: dict[str, Any], new: Mapping[str, Any], where: tuple[str, ...]) -> None:
    if where == ("data",):
        if "dataset" in new and new["dataset"] != old.get("dataset"):
            for key in [key for key in old if key not in DATA_COMMON]:
                del old[key]
    elif "type" in new and new["type"] != old.get("type"):
        kept = FAMILIES[where].common if where in FAMILIES else {}
        for key in [key for key in old if key not in kept]:
            del old[key]


def apply(raw: dict[str, Any], dotted: str, value: Any) -> None:
    """Apply one override; a number in the path is a place in a list (`phases.0.rounds`)."""
    parts = dotted.split(".")
    for depth, part in enumerate(parts):
        if part.isdigit() and depth:
            items = _descend(raw, parts[:depth])
            if not isinstance(items, list) or int(part) >= len(items):
                size = len(items) if isinstance(items, list) else "no"
                raise ConfigError(f"{dotted}: {'.'.join(parts[:depth])} has {size} entries")
            if depth == len(parts) - 1:
                items[int(part)] = value
            elif isinstance(items[int(part)], dict):
                merge(items[int(part)], _nest(parts[depth + 1 :], value))
            return
    merge(raw, _nest(parts, value))


def _nest(parts: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(parts):
        value = {part: value}
    return dict(value)


def _descend(raw: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


def expand_phases(raw: dict[str, Any], rounds_given: bool) -> None:
    """Complete each phase with the sections that it does not override, and let `rounds` be their sum."""
    phases = raw.get("phases")
    if not isinstance(phases, list) or not phases:
        return
    complete = []
    for number, phase in enumerate(phases):
        if not isinstance(phase, dict):
            raise ConfigError(f"phases.{number}: a phase is a mapping with rounds and overrides, got {phase!r}")
        full = {key: deepcopy(raw[key]) for key in PHASE_SECTIONS if key in raw}
        merge(full, phase)
        complete.append(full)
    raw["phases"] = complete
    counts = [phase["rounds"] for phase in complete if isinstance(phase.get("rounds"), int)]
    if len(counts) == len(complete):
        total = sum(counts)
        if rounds_given and raw["rounds"] != total:
            raise ConfigError(
                f"rounds: got {raw['rounds']}, but the phases have {' + '.join(map(str, counts))} = {total} rounds; "
                "leave rounds out, or change phases.N.rounds"
            )
        raw["rounds"] = total
