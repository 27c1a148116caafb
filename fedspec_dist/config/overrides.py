"""The layers of a config, defaults below a file below what is typed, laid over each other.

A parameter of a method that is named anew stays where the new method has it too, and goes where it has not. What is
typed is one layer: the order of a method's name and its parameters does not matter there, and nothing of it goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from fedspec_dist.config import methods
from fedspec_dist.config.files import ConfigError, shown
from fedspec_dist.config.schema import PHASE_SECTIONS, Data
from fedspec_dist.config.trees import Path_, find, leaves, named

# Where a bare name may stand for `{type: name}`.
FAMILIES = {tuple(key.split(".")): family for key, family in methods.FAMILIES.items()}

# Keys of `data` that belong to every data set; the others are parameters of the one that is named.
DATA_COMMON = tuple(Data.model_fields)


def split_arguments(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The config file among the arguments of a command, and the overrides. A file that exists is one, also with a `=`.

    Raises:
        ConfigError: more than one file.
    """
    files = [word for word in words if "=" not in word or _is_file(word)]
    if len(files) > 1:
        raise ConfigError(f"one config file, got {', '.join(map(shown_word, files))}; an override is key=value")
    return (files[0] if files else None), [word for word in words if word not in files]


def shown_word(word: str) -> str:
    return word if len(word) < 100 else shown(word)


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):
        return False


# ------------------------------------------------------------------------------------------ layers


def uniform(changes: Mapping[str, Any]) -> dict[str, Any]:
    """With a data set's own parameters, which stand beside `dataset` in a file, under its name; of phases too."""
    changes = dict(changes)
    data = changes.get("data")
    if isinstance(data, dict) and (own := {key: value for key, value in data.items() if key not in DATA_COMMON}):
        dataset = named(data.get("dataset", {}))
        changes["data"] = {key: value for key, value in data.items() if key in DATA_COMMON}
        changes["data"]["dataset"] = dataset | own if isinstance(dataset, dict) else dataset
    return changes


def merge(base: dict[str, Any], changes: Mapping[str, Any], path: Path_ = (), typed: bool = False) -> None:
    """Lay `changes` over `base` in place; `typed` when both are of what was typed."""
    for key, value in changes.items():
        where = (*path, str(key))
        if where in FAMILIES:
            value = named(value)
            if key in base:
                base[key] = named(base[key])
        if isinstance(value, Mapping):
            old = base.setdefault(key, {})
            if not isinstance(old, dict):
                old = base[key] = {}
            if where in FAMILIES and "type" in value:
                _drop_parameters(old, value["type"], FAMILIES[where], typed)
            merge(old, value, where, typed)
        else:
            base[key] = deepcopy(value)


def _drop_parameters(old: dict[str, Any], name: Any, family: methods.Family, typed: bool) -> None:
    """Of the method that was named before, what the new one has not; null states nothing."""
    former = old.get("type")
    if former == name or not isinstance(name, str) or name not in family.table:
        return
    known = family.parameters(name)
    if typed:  # two names were typed, and the last one counts; what belongs to none of them is for the check to refuse
        meant = family.parameters(former) if isinstance(former, str) and former in family.table else {}
        dropped = [key for key in old if key in meant and key not in known]
    else:
        dropped = [key for key in old if key != "type" and (key not in known or old[key] is None)]
    for key in dropped:
        del old[key]


class Typed:
    """What was typed, as one layer: `key=value` pairs, of which the last of a key counts.

    A number in a key is a place in a list (`phases.0.rounds`). Such pairs are laid over the list that is there when all
    others have been.
    """

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        self.tree: dict[str, Any] = {}
        self.places: dict[Path_, Any] = {}  # path to a place -> what is laid over the entry there
        self._whole: set[Path_] = set()  # those at which the whole entry was typed
        for dotted, value in pairs:
            parts = tuple(dotted.split("."))
            depth = next((depth for depth, part in enumerate(parts) if depth and _is_place(part)), None)
            if depth is None:
                self._refuse_keys_below_a_value(parts)
                merge(self.tree, uniform(_nest(parts, value)), typed=True)
            elif depth == len(parts) - 1:
                self.places[parts] = value
                self._whole.add(parts)
            else:
                entry = self.places.setdefault(parts[: depth + 1], {})
                if not isinstance(entry, dict):
                    entry = self.places[parts[: depth + 1]] = named(entry)
                merge(entry, _nest(parts[depth + 1 :], value), typed=True)

    def _refuse_keys_below_a_value(self, parts: Path_) -> None:
        for depth in range(1, len(parts)):
            above = named(find(self.tree, parts[:depth]))
            if above is not None and not isinstance(above, dict):
                raise ConfigError(f"{'.'.join(parts[:depth])}: got {shown(above)}, and keys below it; give one of them")

    def lay_over(self, raw: dict[str, Any]) -> None:
        merge(raw, self.tree)
        for parts, value in self.places.items():
            self._lay_at(raw, parts, value)

    def _lay_at(self, raw: dict[str, Any], parts: Path_, value: Any) -> None:
        items, place = find(raw, parts[:-1]), int(parts[-1])
        where = ".".join(parts[:-1])
        if not isinstance(items, list) or place >= len(items):
            size = len(items) if isinstance(items, list) else "no"
            raise ConfigError(f"{'.'.join((*parts, *next(leaves(value), ())))}: {where} has {size} entries")
        if parts in self._whole:
            items[place] = deepcopy(value)
            return
        items[place] = named(items[place])
        if not isinstance(items[place], dict):
            raise ConfigError(
                f"{'.'.join((*parts, *next(leaves(value), ())))}: {where}.{place} is {shown(items[place])}, which has "
                "no keys of its own"
            )
        merge(items[place], value)

    def keys(self) -> list[Path_]:
        """The paths of all single values."""
        found = list(leaves(self.tree))
        for parts, value in self.places.items():
            found += [(*parts, *leaf) for leaf in leaves(value)]
        return found


def _is_place(part: str) -> bool:
    return part.isascii() and part.isdigit()


def _nest(parts: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(parts):
        value = {part: value}
    return dict(value)


# ------------------------------------------------------------------------------------------ phases


def expand_phases(raw: dict[str, Any], rounds_given: bool) -> None:
    """Complete each phase with the sections that it does not override, and let `rounds` be their sum."""
    phases = raw.get("phases")
    if not isinstance(phases, list) or not phases:
        return
    complete = []
    for number, phase in enumerate(phases):
        if not isinstance(phase, dict):
            raise ConfigError(f"phases.{number}: a phase is a mapping with rounds and overrides, got {shown(phase)}")
        full = {key: deepcopy(raw[key]) for key in PHASE_SECTIONS if key in raw}
        merge(full, phase)
        complete.append(full)
    raw["phases"] = complete
    counts = [phase["rounds"] for phase in complete if isinstance(phase.get("rounds"), int)]
    if len(counts) == len(complete):
        total = sum(counts)
        if rounds_given and raw["rounds"] != total:
            terms = " + ".join(map(str, counts)) if len(counts) <= 20 else "their sum"
            raise ConfigError(
                f"rounds: got {shown(raw['rounds'])}, but the phases have {terms} = {total} rounds; leave rounds out, "
                "or change phases.N.rounds"
            )
        raw["rounds"] = total


def refuse_overruled(raw: Mapping[str, Any], typed: Typed) -> None:
    """What was typed of a section, and a phase of the file sets to something else: half of the run would not heed it.

    `raw` has its phases expanded. A phase that has another method, without the parameter, is no contradiction as long
    as one uses it.

    Raises:
        ConfigError: naming where it is overruled.
    """
    phases = raw.get("phases")
    if not isinstance(phases, list) or not phases:
        return
    for leaf in leaves({key: typed.tree[key] for key in PHASE_SECTIONS if key in typed.tree}):
        states = [_state_in(phase, leaf, find(typed.tree, leaf)) for phase in phases]
        overruling = [number for number, (state, _) in enumerate(states) if state == _OVERRULED]
        untold = [number for number in overruling if not _is_typed(typed, number, leaf)]
        used = [number for number, (state, _) in enumerate(states) if state == _USED]
        if not untold and used:
            continue
        key, value = ".".join(leaf).removesuffix(".type"), find(typed.tree, leaf)
        if overruling:
            number = (untold or overruling)[0]
            also = f"give phases.{number}.{key}=... as well, if that phase is to have it"
            first = f", or phases.{used[0]}.{key}={_plain(value)} in place of {key}" if used else ""
            raise ConfigError(
                f"{key}: got {shown(value)}, but phases.{number}.{key} overrules it with "
                f"{shown(states[number][1])}; {also}{first}"
            )
        if not used:
            raise ConfigError(
                f"{key}: got {shown(value)}, but no phase has a method with such a parameter; leave it out"
            )


_USED, _OVERRULED, _LACKING = "used", "overruled", "lacking"


def _state_in(phase: Mapping[str, Any], leaf: Path_, value: Any) -> tuple[str, Any]:
    """What a phase makes of a typed value, and the value that it has itself."""
    tree: Any = phase
    for depth, part in enumerate(leaf):
        if leaf[:depth] in FAMILIES:
            tree = named(tree)
        if not isinstance(tree, Mapping):
            return _OVERRULED, tree
        if part not in tree:
            return (_LACKING, None) if leaf[:depth] in FAMILIES else (_OVERRULED, tree)
        tree = tree[part]
    return (_USED if tree == value else _OVERRULED), tree


def _is_typed(typed: Typed, number: int, leaf: Path_) -> bool:
    if "phases" in typed.tree:
        return True
    entry = typed.places.get(("phases", str(number)))
    while leaf and isinstance(entry, dict):
        if leaf[0] not in entry:
            return False
        entry, leaf = entry[leaf[0]], leaf[1:]
    return entry is not None


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)
