"""Modules of earlier versions are found under their names of then."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from fedspec_dist.moved import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_module_is_the_same_under_its_old_name(old: str, new: str) -> None:
    module = import_module(f"fedspec_dist.{new}")
    with pytest.warns(FutureWarning, match=new):
        assert import_module(f"fedspec_dist.{old}") is module
    assert module.__name__ == f"fedspec_dist.{new}"
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", (Path(__file__).parent / "golden" / "modules.txt").read_text().split())
def test_every_module_that_a_plugin_may_have_imported_is_found(name: str) -> None:
    """Those of the version before the folders were drawn anew."""
    assert import_module(name)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_part_of_a_package_that_moved_is_there_once() -> None:
    old = import_module("fedspec_dist.tracking.console")
    assert old is import_module("fedspec_dist.runs.trackers.console")


def test_what_was_never_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("fedspec_dist.nothing_like_it")
