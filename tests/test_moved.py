"""Modules of earlier versions are found under their names of then."""

from __future__ import annotations

from importlib import import_module

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


def test_what_was_never_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("fedspec_dist.nothing_like_it")
