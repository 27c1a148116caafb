"""Which folder may import which, read from the code itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fedspec_dist"
BASE = {
    "config",
    "methods",
    "seeding",
    "draws",
    "parameters",
    "cohort",
    "checks",
}
# folder -> what of the package it may import besides itself. Level by level: a folder knows those below it only.
ALLOWED: dict[str, set[str]] = {
    "own_methods": set(),
    "methods": {"own_methods"},
    "config_text": set(),
    "overrides": {"methods", "config_text"},
    "compatibility": {"methods", "config_text"},
    "config": {"methods", "config_text", "overrides", "compatibility"},
    "seeding": set(),
    "draws": {"seeding"},
    "parameters": set(),
    "cohort": {"parameters"},
    "checks": set(),
    "data": {"seeding"},
    "models": set(),
    "tasks": set(),
    "filters": {"parameters"},
    "fisher": {"parameters", "seeding"},
    "clients": {"parameters", "seeding", "cohort", "checks", "data", "models", "tasks", "filters", "fisher"},
    "server": {"parameters", "seeding", "cohort", "checks", "fisher"},
    "distributed": {"parameters", "seeding", "cohort", "draws"},
    "tracking": set(),
    "sources": {"tracking"},
    "identity": {"config", "methods", "data", "sources", "tracking"},
    "rounds": BASE
    | {"identity", "sources"}
    | {"data", "models", "tasks", "filters", "fisher", "clients", "server", "distributed", "tracking"},
    "main": BASE | {"rounds", "distributed", "tracking"},
    "doctor": {"config", "methods", "data", "distributed", "tracking"},
}
LOGIN_NODE = (
    *("config", "config_text", "overrides", "compatibility", "methods", "own_methods"),
    *("seeding", "sources", "identity", "tracking"),
)
MATHS = ("cohort", "filters", "fisher", "tasks", "models", "server", "clients")
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
    if _unit(path) != "distributed":
        assert not any(name.startswith("torch.distributed") for name in _imports(path))


@pytest.mark.parametrize("path", [p for p in MODULES if _unit(p) in MATHS], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_maths_neither_logs_nor_opens_files(path: Path) -> None:
    assert not _imports(path) & {"logging", "pathlib", "os", "json"}
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call.id for call in calls if isinstance(call, ast.Name) and call.id in ("open", "print")]


@pytest.mark.parametrize("unit", [*LOGIN_NODE])
def test_what_a_login_node_needs_imports_no_torch(unit: str) -> None:
    for path in MODULES:
        if _unit(path) == unit and path.name != "tensorboard.py":
            assert not any(name.split(".")[0] == "torch" for name in _imports(path)), path
