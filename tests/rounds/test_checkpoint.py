"""Checkpoints: whole or not there, believed only when they verify, never lost to the next one."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedspec_dist.rounds import checkpoint
from fedspec_dist.rounds.checkpoint import CheckpointError, SavedState, load_newest, save, write_model

FINGERPRINT = "0123abcd"


def _state(number: int, fingerprint: str = FINGERPRINT) -> SavedState:
    weight = torch.full((3, 2), float(number)).T  # not contiguous
    model = {"fc.weight": weight, "steps": torch.tensor(number)}
    clients = iter([{3: torch.ones(2, 5), 40: torch.zeros(2, 5)}, {41: torch.full((2, 5), 7.0)}])
    return SavedState(number, fingerprint, model, {"m": torch.ones(4)}, clients)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", _state(7), keep=2)
    assert path.name == "round-000007"
    loaded = load_newest(tmp_path / "checkpoints", FINGERPRINT)
    assert loaded is not None
    assert loaded.round == 7
    assert torch.equal(loaded.model["fc.weight"], torch.full((2, 3), 7.0))
    assert loaded.model["steps"] == 7
    assert torch.equal(loaded.server["m"], torch.ones(4))
    assert load_file(path / "model.safetensors").keys() == {"fc.weight", "steps"}
    first, second = loaded.clients
    assert (list(first), list(second)) == ([3, 40], [41])
    assert torch.equal(second[41], torch.full((2, 5), 7.0))
    assert _names(path) == [
        "clients-00000.safetensors",
        "clients-00001.safetensors",
        "model.safetensors",
        "server.safetensors",
        "state.json",
    ]


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "nothing", FINGERPRINT) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (5, 10, 15, 20):
        save(tmp_path, _state(number), keep=2)
    assert _names(tmp_path) == ["round-000015", "round-000020"]


def test_rounds_are_counted_not_spelled(tmp_path: Path) -> None:
    for number in (999_999, 1_000_000, 1_000_001):
        save(tmp_path, _state(number), keep=2)
    assert _names(tmp_path) == ["round-1000000", "round-1000001"]
    loaded = load_newest(tmp_path, FINGERPRINT)
    assert loaded is not None
    assert loaded.round == 1_000_001


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: _truncate(folder / "model.safetensors"), "model.safetensors is damaged"),
        (lambda folder: _flip_a_bit(folder / "server.safetensors"), "server.safetensors is damaged"),
        (lambda folder: (folder / "server.safetensors").unlink(), "No such file"),
        (lambda folder: _flip_a_bit(folder / "clients-00001.safetensors"), "clients-00001.safetensors is damaged"),
        (lambda folder: (folder / "clients-00000.safetensors").unlink(), "No such file"),
        (lambda folder: (folder / "state.json").unlink(), "No such file"),
        (lambda folder: (folder / "state.json").write_text(""), "passed over"),
        (lambda folder: (folder / "state.json").write_text("[1]"), "passed over"),
        (lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe"), "passed over"),
        (lambda folder: _edit(folder / "state.json", format=99), "format 99, this version reads 3"),
        (lambda folder: _edit(folder / "state.json", config="ffffffff"), "belongs to config ffffffff, not 0123abcd"),
        (lambda folder: _edit(folder / "state.json", round=3), "is of round 3"),
        (lambda folder: _edit(folder / "state.json", round="ten"), "passed over"),
        (lambda folder: _edit(folder / "state.json", files=None), "passed over"),
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_passed_over_with_a_reason(
    damage: object, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, _state(5), keep=2)
    damage(save(tmp_path, _state(10), keep=2))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        loaded = load_newest(tmp_path, FINGERPRINT)
    assert loaded is not None
    assert loaded.round == 5
    assert "round-000010 passed over" in caplog.text
    assert reason in caplog.text


def test_names_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, _state(5), keep=1)
    for name in ("round-000009.bak", "round-9x", "notes"):
        shutil.copytree(tmp_path / "round-000005", tmp_path / name)
    loaded = load_newest(tmp_path, FINGERPRINT)
    assert loaded is not None
    assert loaded.round == 5
    save(tmp_path, _state(6), keep=1)
    assert _names(tmp_path) == ["notes", "round-000006", "round-000009.bak", "round-9x"]


def test_a_damaged_newer_one_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    _truncate(save(tmp_path, _state(10), keep=1) / "model.safetensors")
    save(tmp_path, _state(7), keep=1)
    loaded = load_newest(tmp_path, FINGERPRINT)
    assert loaded is not None
    assert loaded.round == 7
    save(tmp_path, _state(10), keep=1)  # takes the place of the damaged one
    loaded = load_newest(tmp_path, FINGERPRINT)
    assert loaded is not None
    assert loaded.round == 10
    assert _names(tmp_path) == ["round-000010"]


def test_leftovers_of_killed_processes_go(tmp_path: Path) -> None:
    save(tmp_path, _state(5), keep=2)
    leftover = tmp_path / ".round-000010.12345"
    shutil.copytree(tmp_path / "round-000005", leftover)
    assert load_newest(tmp_path, FINGERPRINT).round == 5  # type: ignore[union-attr]
    save(tmp_path, _state(10), keep=2)
    assert _names(tmp_path) == ["round-000005", "round-000010"]


def _no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "where",
    [(os, "fsync"), (checkpoint, "save_file"), (os, "replace"), (Path, "write_text"), (Path, "mkdir")],
    ids=["fsync", "save_file", "rename", "state", "mkdir"],
)
def test_a_full_disk_leaves_earlier_checkpoints_and_no_rubbish(
    where: tuple[object, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, _state(5), keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(*where, _no_space)
        with pytest.raises(CheckpointError, match=r"(?s)round 10 .*No space left.*untouched: free space or .*resume"):
            save(tmp_path, _state(10), keep=1)
    assert _names(tmp_path) == ["round-000005"]
    loaded = load_newest(tmp_path, FINGERPRINT)
    assert loaded is not None
    assert loaded.round == 5
    save(tmp_path, _state(10), keep=1)
    assert _names(tmp_path) == ["round-000010"]


def test_a_file_system_that_cannot_sync_directories_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def refuse_directories(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    save(tmp_path, _state(5), keep=1)
    assert load_newest(tmp_path, FINGERPRINT) is not None


def test_the_final_model_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    write_model(path, _state(1).model)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        with pytest.raises(CheckpointError, match=r"model\.safetensors could not be written: .*No space"):
            write_model(path, _state(2).model)
    assert load_file(path)["steps"] == 1
    assert _names(tmp_path) == ["model.safetensors"]
