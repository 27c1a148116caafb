"""Mappings in mappings, as a file states them: what stands where, and what differs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

Path_ = tuple[str, ...]


def named(value: Any) -> Any:
    """A bare name in the form of a mapping."""
    return {"type": value} if isinstance(value, str) else value


def leaves(value: Any) -> Iterator[Path_]:
    """The paths of the single values below."""
    if not isinstance(value, dict):
        yield ()
        return
    for key, item in value.items():
        for leaf in leaves(item):
            yield (str(key), *leaf)


def find(tree: Any, parts: Collection[str]) -> Any:
    """The value at a path, None where there is none."""
    for part in parts:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


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
