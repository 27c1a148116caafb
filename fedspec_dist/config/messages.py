"""One sentence for each problem of a config: the dotted key, what was given, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from fedspec_dist.config.files import shown
from fedspec_dist.config.overrides import DATA_COMMON, FAMILIES, shown_word
from fedspec_dist.config.schema import Config
from fedspec_dist.config.section import Choice, Section
from fedspec_dist.config.trees import named


def explain(item: Any, raw: dict[str, Any]) -> str:
    """One pydantic error as a sentence: the dotted key, what was given, what is allowed."""
    key, kind, context = _dotted(item["loc"]), item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{key}: unknown key{_suggest(key.split('.')[-1], _allowed(item['loc'], raw))}"
    if kind == "model_type":
        return f"{key}: got {shown(item['input'])}; must be a mapping of keys to values"
    if kind == "missing":
        return f"{key}: must be given"
    if kind == "choice_unknown":
        given = item["input"].get("type") if isinstance(item["input"], dict) else item["input"]
        return f"{key}: got {shown(given)}; {item['msg']}"
    if kind in ("union_tag_invalid", "literal_error"):
        allowed = context.get("expected_tags") or context.get("expected", "")
        given = item["input"].get("type") if isinstance(item["input"], dict) else item["input"]
        return f"{key}: got {shown(given)}; allowed: {allowed.replace(' or ', ', ')}"
    if kind == "union_tag_not_found":
        return f"{key}: got {shown(item['input'])}; give a name, or a mapping with a type"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key}: got {shown(item['input'])}; {message}"


def _dotted(location: Sequence[int | str]) -> str:
    """The key as the user writes it: a data set's parameters stand in `data`; augmentations have no tags."""
    parts = [part for part in location if part not in ("flip", "crop")]
    if parts[:2] == ["data", "dataset"] and len(parts) > 2:
        del parts[1]
    return shown_word(".".join(map(str, parts)))


def _sections(section: type[Section], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], type[Section]]:
    """By their paths, those in lists and in options too."""
    found = {path: section}
    for key, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section) and not issubclass(kind, Choice):
                found |= _sections(kind, (*path, key))
    return found


_SECTIONS = _sections(Config)


def _allowed(location: Sequence[int | str], raw: Any) -> list[str]:
    """The keys that are known where an unknown one was found."""
    parents = tuple(part for part in location[:-1] if isinstance(part, str))
    if parents[:1] == ("phases",) and len(parents) > 1:
        parents = parents[1:]
    if parents == ("data", "dataset"):
        return [*DATA_COMMON, *FAMILIES[parents].parameters(named(raw["data"]["dataset"])["type"])]
    if parents in FAMILIES:
        for part in location[:-1]:
            raw = raw if part == 0 and isinstance(raw, dict) else raw[part]  # one transform may stand without the list
        return ["type", *FAMILIES[parents].parameters(named(raw)["type"])]
    return list(_SECTIONS[parents].model_fields) if parents in _SECTIONS else []


def _suggest(key: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(key[:50], allowed, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint or ';'} allowed: {', '.join(allowed)}" if allowed else hint
