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
    """A config that cannot run; the message is for the person who typed it.

    `everywhere`: every rank finds the same, so that one of them says it. Otherwise it depends on the host.
    """

    def __init__(self, message: str, everywhere: bool = True) -> None:
        super().__init__(message)
        self.everywhere = everywhere


# Where a bare name may stand for `{type: name}`.
FAMILIES = {tuple(key.split(".")): family for key, family in methods.FAMILIES.items()}

# What a phase may override.
PHASE_SECTIONS = ("trainable", "local", "filter", "server")

# Keys of `data` that belong to every data set; the others are parameters of the one that is named.
DATA_COMMON = ("dataset", "root", "download", "partition", "augment")


_FLOAT, _INT = "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"
_MERGE, _TIMESTAMP = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with repairs: `1e-3` and `-.5` are numbers, `0123`, `1:30` and `2024-01-01` are words, and a key given
    twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(f"{key!r}: a key is a name{key_node.start_mark}")
            if key in seen:
                raise ConfigError(f"{key}: given twice{key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: a name such as `1e3` is quoted."""


def _repair(kind: Any) -> None:
    kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_FLOAT, _INT, _TIMESTAMP)]
        for first, resolvers in kind.yaml_implicit_resolvers.items()
    }
    number = re.compile(r"^[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|^\.(nan|NaN|NAN)$")
    kind.add_implicit_resolver(_FLOAT, number, list("-+0123456789."))
    kind.add_implicit_resolver(_INT, re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789"))


_repair(_Loader)
_repair(_Dumper)


def dump(content: Mapping[str, Any]) -> str:
    """As YAML that `read` gives back."""
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, width=110)


def read(path: Path) -> dict[str, Any]:
    try:
        content = _load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a config: {error}") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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
        return key, _load(text)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{key}: {text!r} is not a YAML value") from None


def _load(text: str) -> Any:
    """The content; what aliases refer to is there once for each of them, so that changing one changes no other."""
    return _unshared(yaml.load(text, _Loader))


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


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


def difference(base: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """What to merge into `base` to have `full`; both are complete, with methods as mappings that have a `type`."""
    changed: dict[str, Any] = {}
    for key, value in full.items():
        old = base.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and value.get("type") == old.get("type"):
            if inner := difference(old, value):
                changed[key] = inner
        elif key not in base or value != old:
            changed[key] = value
    return changed


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
