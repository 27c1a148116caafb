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
from torch import Tensor, nn

from fedspec_dist.config import methods
from fedspec_dist.main import main
from fedspec_dist.models.network import Network
from fedspec_dist.rounds import checkpoint
from fedspec_dist.rounds.checkpoint import CheckpointError, SavedState, load_newest, save, write_model
from tests.rounds.jobs import TINY

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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"files": {}}, "lists no files, not all that must be there"),
        ({"client_files": 0}, "not all that must be there"),
        ({"client_files": 3}, "not all that must be there"),
        ({"client_files": -1}, "counts -1 files of clients"),
        ({"client_files": True}, "counts True files of clients"),
        ({"client_files": 10**12}, "not all that must be there"),
        ({"files": {"model.safetensors": None}}, "not all that must be there"),
        ({"identity": {"data": 1}}, "does not say what it was made with"),
        ({"round": True}, "is of round True"),
        ({"format": []}, "format []"),
    ],
)
def test_a_description_is_believed_only_if_it_names_all_that_must_be_there(
    changes: dict[str, object], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, _state(5), keep=2)
    _edit(save(tmp_path, _state(10), keep=2) / "state.json", **changes)
    with caplog.at_level(logging.WARNING):
        loaded = load_newest(tmp_path, FINGERPRINT)
    assert loaded is not None
    assert loaded.round == 5
    assert reason in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "server.safetensors", "clients-00001.safetensors"])
def test_a_file_that_is_not_listed_is_missed(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, _state(10), keep=2) / "state.json"
    files = json.loads(path.read_text())["files"]
    del files[name]
    _edit(path, files=files)
    (path.parent / name).unlink()
    assert load_newest(tmp_path, FINGERPRINT) is None


def test_sizes_are_compared_before_anything_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path, _state(10), keep=2)
    with (path / "server.safetensors").open("r+b") as file:
        file.truncate(2**40)  # sparse; reading it takes minutes
    with caplog.at_level(logging.WARNING):
        assert load_newest(tmp_path, FINGERPRINT) is None
    assert "server.safetensors is damaged (1099511627776 bytes, " in caplog.text


class Tied(Network):
    """Two layers with one weight."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(input_shape[1] * input_shape[2], 8)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.fc = nn.Linear(8, num_classes)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:
        return self.third(self.second(self.first(images.flatten(1)).relu()).relu())


@pytest.mark.parametrize("write", ["checkpoint", "model"])
def test_tensors_that_share_memory_are_in_the_file_under_each_name(write: str, tmp_path: Path) -> None:
    model = Tied((1, 4, 4), 3)
    if write == "model":
        write_model(tmp_path / "model.safetensors", model.state_dict())
        stored = load_file(tmp_path / "model.safetensors")
    else:
        saved = SavedState(1, FINGERPRINT, model.state_dict(), {})
        stored = load_file(save(tmp_path, saved, keep=1) / "model.safetensors")
    other = Tied((1, 4, 4), 3)
    other.load_state_dict(stored)  # strict: every name is there
    assert torch.equal(other.second.weight, model.second.weight)
    assert other.third.weight is other.second.weight


def test_a_run_with_tied_weights_stops_resumes_and_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.MODELS, "tied", methods.method("tests.rounds.test_checkpoint:Tied"))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    arguments = [*TINY, "model=tied", "rounds=3", "checkpoint.every=1"]
    assert main([*arguments, f"output={tmp_path / 'whole'}"]) == 0
    assert main([*arguments, f"output={tmp_path / 'stopped'}"]) == 0
    (whole,), (stopped,) = (tmp_path / "whole").iterdir(), (tmp_path / "stopped").iterdir()
    for name in ("summary.json", "model.safetensors"):
        (stopped / name).unlink()
    shutil.rmtree(stopped / "checkpoints" / "round-000003")
    assert main([*arguments, f"output={tmp_path / 'stopped'}"]) == 0
    stored = load_file(stopped / "model.safetensors")
    assert torch.equal(stored["second.weight"], stored["third.weight"])
    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
