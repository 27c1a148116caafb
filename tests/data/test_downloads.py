"""Downloads by several processes at once, by processes that are killed, and without locks."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedspec_dist.data import downloads
from fedspec_dist.data.downloads import download_into

FILES = ("raw/a", "raw/b", "c")


def whole(root: Path) -> Callable[[], bool]:
    return lambda: all((root / name).is_file() for name in FILES)


class Downloader:
    """Writes the files in two halves, and in between waits to be told to go on."""

    def __init__(self) -> None:
        self.calls = 0
        self.is_half_done = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("w") as file:
                file.write("one")
                file.flush()
                self.is_half_done.set()
                assert self.may_go_on.wait(20)
                file.write("two")


def contents(root: Path) -> set[str]:
    return {(root / name).read_text() for name in FILES}


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name[0] != "."}


def test_nobody_sees_a_file_before_it_is_whole(tmp_path: Path) -> None:
    download = Downloader()
    thread = threading.Thread(target=download_into, args=(tmp_path / "root", "x", whole(tmp_path / "root"), download))
    thread.start()
    assert download.is_half_done.wait(20)
    (half,) = (tmp_path / "root").glob(".x.tmp-*")
    assert names(half) == {"raw/a"}
    assert not any((tmp_path / "root" / name).exists() for name in FILES)
    download.may_go_on.set()
    thread.join(20)
    assert names(tmp_path / "root") == set(FILES)
    assert contents(tmp_path / "root") == {"onetwo"}


def test_who_comes_second_waits_and_does_not_download(tmp_path: Path) -> None:
    first, second = Downloader(), Downloader()
    threads = [
        threading.Thread(target=download_into, args=(tmp_path, "x", whole(tmp_path), download))
        for download in (first, second)
    ]
    threads[0].start()
    assert first.is_half_done.wait(20)
    threads[1].start()
    time.sleep(0.3)
    first.may_go_on.set()
    for thread in threads:
        thread.join(20)
    assert (first.calls, second.calls) == (1, 0)


def test_without_locks_both_download_and_the_files_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(downloads.fcntl, "flock", flock)
    monkeypatch.setattr(downloads, "temporary_name", lambda path: path.with_name(f".tmp-{threading.get_ident()}"))
    first, second = Downloader(), Downloader()
    threads = [
        threading.Thread(target=download_into, args=(tmp_path, "x", whole(tmp_path), download))
        for download in (first, second)
    ]
    for thread, download in zip(threads, (first, second), strict=True):
        thread.start()
        assert download.is_half_done.wait(20)
    first.may_go_on.set()
    threads[0].join(20)
    assert contents(tmp_path) == {"onetwo"}
    second.may_go_on.set()
    threads[1].join(20)
    assert contents(tmp_path) == {"onetwo"}
    assert names(tmp_path) == set(FILES)


def test_what_a_killed_download_left_goes_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / f".x.tmp-{socket.gethostname()}-999999999"
    others = tmp_path / f".x.tmp-elsewhere-{os.getpid()}"
    for folder in (left, others):
        folder.mkdir()
        (folder / "a").touch()
    download = Downloader()
    download.may_go_on.set()
    download_into(tmp_path, "x", whole(tmp_path), download)
    assert not left.exists()
    assert others.exists(), "another host's process may be at it"


def test_a_failed_download_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "raw").mkdir(parents=True)
        (folder / "raw" / "a").write_text("half")
        raise OSError("no route to host")

    with pytest.raises(OSError, match="no route"):
        download_into(tmp_path, "x", whole(tmp_path), fail)
    assert names(tmp_path) == set()
    assert not list(tmp_path.glob(".x.tmp-*"))
