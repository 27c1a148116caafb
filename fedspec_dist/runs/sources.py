"""The Python sources that a result was made with: a plugin's and this package's, found without importing. No torch.

A plugin's sources are its module and all modules that it imports, directly or not, from the same package, or from the
same folder where that is a folder of the user's own. Files of data that it reads are not among them.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from fedspec_dist.runs.safe_files import create, open_regular, temporary_name

DIGITS = 16  # of a digest, in hex

_PACKAGE = Path(__file__).parents[1]
# Of this package, what only observes: a run is the same with another console or another health check.
_OBSERVERS = ("doctor", "runs", "main.py")


@cache
def package_digest() -> str:
    """Of the package's own sources, without what only observes."""
    names = (path.relative_to(_PACKAGE) for path in _PACKAGE.rglob("*.py"))
    return _digest({name.as_posix(): _PACKAGE / name for name in names if name.parts[0] not in _OBSERVERS})


@cache
def module_digest(module: str) -> str:
    """Of a plugin's sources, equal wherever they lie; empty where they are not found."""
    sources = _sources(module)
    return _digest({name.as_posix(): path for name, path in sources.items()}) if sources else ""


def copy_sources(modules: Iterable[str], folder: Path) -> None:
    """The sources of plugins as `folder/MODULE-DIGEST/...`; what is there already stays.

    Raises:
        OSError: the folder cannot be written.
    """
    for module in modules:
        target = folder / f"{module}-{module_digest(module)[:8]}"
        if target.exists():
            continue
        temporary = temporary_name(target)
        for name, path in _sources(module).items():
            copy = temporary / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(create(copy), "wb") as file:
                file.write(_content(path))
        if temporary.exists():
            temporary.rename(target)


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        content = _content(files[name])
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:DIGITS]


@cache
def _content(path: Path) -> bytes:
    """Read once: what is compared is what is copied."""
    with open_regular(path) as file:
        return file.read()


@cache
def _sources(module: str) -> dict[Path, Path]:
    """Where each source would lie below an entry of `sys.path` -> where it lies."""
    found: dict[Path, Path] = {}
    if _find(module) is None:
        return found
    top, entry = module.partition(".")[0], _entry(module)
    side_by_side = entry is not None and not _is_shared(entry)
    todo, seen = [module], set()
    while todo:
        name = todo.pop()
        if name in seen or not (name.partition(".")[0] == top or (side_by_side and _entry(name) == entry)):
            continue
        seen.add(name)
        todo += _parents(name)
        spec = _find(name)
        if spec is None or not spec.origin or not spec.has_location or Path(spec.origin).is_relative_to(_PACKAGE):
            continue
        path, is_package = Path(spec.origin), spec.submodule_search_locations is not None
        folder = Path(*name.split(".")) if is_package else Path(*name.split(".")[:-1])
        found[folder / path.name] = path
        if path.suffix == ".py":
            todo += _imports(path, name if is_package else name.rpartition(".")[0])
    return found


def _parents(name: str) -> list[str]:
    """The packages around a module, which Python imports first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _imports(path: Path, package: str) -> Iterator[str]:
    """What a module imports, in functions too; a name imported from a package may be a module of it."""
    try:
        tree = ast.parse(_content(path))
    except (SyntaxError, ValueError, RecursionError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")
            stem = around[: len(around) - node.level + 1] if node.level else []
            base = ".".join([*stem, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def _find(name: str) -> ModuleSpec | None:
    """Where a module's source lies. Of a dotted name `importlib.util.find_spec` would import the packages around it."""
    path: list[str] | None = None
    spec = None
    for part in [*_parents(name), name]:
        try:
            # Of a top-level name this imports nothing, and it knows of modules that are installed as links.
            spec = find_spec(part) if path is None else PathFinder.find_spec(part, path)
        except (ImportError, ValueError, OSError):
            return None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


@cache
def _entry(name: str) -> Path | None:
    """The entry of `sys.path` by which the module's top-level package or module is found."""
    spec = _find(name.partition(".")[0])
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:  # a package, with or without an __init__
        places = list(spec.submodule_search_locations)
        return Path(places[0]).absolute().parent if places else None
    return Path(spec.origin).absolute().parent if spec.origin and spec.has_location else None


def _is_shared(entry: Path) -> bool:
    """Whether modules side by side there have nothing to do with each other: the standard library's, installed ones."""
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return str(entry) in installed or entry.name in ("site-packages", "dist-packages")
