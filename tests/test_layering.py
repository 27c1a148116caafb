"""Which folder may import which, read from the code itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fedspec_dist"
# folder -> what of the package it may import besides itself. Level by level: a folder knows those below it only.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "config": set(),
    "moved": set(),
    "data": {"core"},
    "models": set(),
    "tasks": {"core"},
    "filters": {"core"},
    "fisher": {"core"},
    "clients": {"core", "data", "models", "tasks", "filters", "fisher"},
    "server": {"core", "fisher"},
    "distributed": {"core"},
    "processes": {"core", "distributed"},
    "runs": {"core", "config", "data"},
    "rounds": {
        *("core", "config", "data", "models", "tasks", "filters", "fisher", "clients", "server"),
        *("distributed", "processes", "runs"),
    },
    "main": {"core", "config", "rounds", "distributed", "processes", "runs"},
    "doctor": {"core", "config", "data", "distributed", "processes", "runs"},
}
# Folders, and modules of others, that a login node imports.
LOGIN_NODE = ("config", "runs", "core/seeding", "core/failures", "core/checks")
MATHS = ("filters", "fisher", "tasks", "models", "server", "clients", "core")
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def _imports(path: Path) -> set[str]:
    """Absolute dotted names of all imports, those inside functions and of relative form included."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            stem = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*stem, *([node.module] if node.module else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def _unit(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_below(path: Path) -> None:
    unit = _unit(path)
    if unit == "__init__":
        return
    used = {name.split(".")[1] for name in _imports(path) if name.startswith("fedspec_dist.")}
    assert used - {unit} <= ALLOWED[unit], f"{unit} may not import {used - {unit} - ALLOWED[unit]}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_collectives_are_called_in_one_folder(path: Path) -> None:
    if _unit(path) not in ("distributed", "processes"):
        assert not any(name.startswith("torch.distributed") for name in _imports(path))


@pytest.mark.parametrize("path", [p for p in MODULES if _unit(p) in MATHS], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_maths_neither_logs_nor_opens_files(path: Path) -> None:
    assert not _imports(path) & {"logging", "pathlib", "os", "json"}
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call.id for call in calls if isinstance(call, ast.Name) and call.id in ("open", "print")]


@pytest.mark.parametrize("unit", [*LOGIN_NODE])
def test_what_a_login_node_needs_imports_no_torch(unit: str) -> None:
    for path in MODULES:
        if str(path.relative_to(PACKAGE)).startswith(unit) and path.name != "tensorboard.py":
            assert not any(name.split(".")[0] == "torch" for name in _imports(path)), path
