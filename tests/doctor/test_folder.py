"""What the doctor finds out about a folder, on good ones and on bad ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedspec_dist.doctor import folder as folders


def test_a_good_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / ".doctor-1"
    assert folders.make(folder) == ""
    assert [folders.write(folder, rank, "token") for rank in range(3)] == ["", "", ""]
    assert folders.sees(folder, 2, "token")[0]
    assert folders.unseen(folder, 3, "token") == []
    assert folders.can_lock(folder, 0)
    assert folders.free_bytes(folder) > 0
    folders.remove(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_around_it_that_others_use_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folders.make(tmp_path / ".doctor-1")
    folders.remove(tmp_path / ".doctor-1")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_made_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert folders.make(tmp_path / "file" / "x") == f"{tmp_path}/file/x: Not a directory"
    assert folders.write(tmp_path / "none", 0, "token") == f"{tmp_path}/none: No such file or directory"
    assert not folders.can_lock(tmp_path / "none", 0)
    assert folders.free_bytes(tmp_path / "none") == 0


def test_files_that_are_not_seen_or_are_others(tmp_path: Path) -> None:
    folders.write(tmp_path, 0, "token")
    folders.write(tmp_path, 1, "another folder's")
    began = time.monotonic()
    assert folders.sees(tmp_path, 1, "token", within_s=0.2)[0] is False
    assert folders.unseen(tmp_path, 3, "token", within_s=0.2) == [1, 2]
    assert time.monotonic() - began < 2


def test_a_file_that_comes_late_is_seen(tmp_path: Path) -> None:
    late = threading.Timer(0.3, folders.write, (tmp_path, 0, "token"))
    late.start()
    seen, seconds = folders.sees(tmp_path, 0, "token")
    late.join()
    assert seen
    assert 0.2 < seconds < 3


def test_renames_here_are_whole(tmp_path: Path) -> None:
    with folders.renaming(tmp_path):
        reads, torn, missed = folders.read_while_renamed(tmp_path, 0.3)
    assert reads > 20
    assert torn == missed == 0


def _in_place(source: Path, target: Path) -> None:
    content = source.read_bytes()
    with target.open("wb", buffering=0) as file:
        file.write(content[:100])
        time.sleep(0.001)
        file.write(content[100:])


def _removed_first(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    time.sleep(0.001)
    source.rename(target)


@pytest.mark.parametrize("replace", [_in_place, _removed_first])
def test_renames_that_others_see_halves_of_are_noticed(
    replace: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders.os, "replace", replace)
    with folders.renaming(tmp_path):
        for seconds in (0.3, 1.0, 5.0):  # a busy machine may see none at first
            _, torn, missed = folders.read_while_renamed(tmp_path, seconds)
            if torn or missed:
                break
    assert (torn > 0, missed > 0) == (replace is _in_place, replace is _removed_first)
