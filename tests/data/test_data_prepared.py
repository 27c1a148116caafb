"""The prepared data set: same tensors as in memory, whole or not there, whoever is killed or late."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
import torch

from fedspec_dist.config.methods import DATASETS
from fedspec_dist.data import prepared
from fedspec_dist.data.files import DatasetNotFoundError
from fedspec_dist.data.images.arrays import Arrays
from fedspec_dist.data.images.digits import Digits
from fedspec_dist.data.images.npz import Npz
from fedspec_dist.data.prepared import Dataset

PROCESSES = multiprocessing.get_context("spawn")


def write_npz(root: Path, num: int = 30, **more: np.ndarray) -> Npz:
    rng = np.random.default_rng(0)
    root.mkdir(exist_ok=True)
    np.savez(
        root / "x.npz",
        train_images=rng.integers(256, size=(num, 6, 5, 3), dtype=np.uint8),
        train_labels=np.arange(num) % 4,
        test_images=rng.integers(256, size=(8, 6, 5, 3), dtype=np.uint8),
        test_labels=np.arange(8) % 4,
        **more,
    )
    return DATASETS["npz"].build(root, False, 0, path=root / "x.npz")


def load(source: Npz, root: Path, prepares: bool = True) -> Dataset:
    return prepared.load("npz", source, root, prepares=prepares, embedded=False)


def assert_same(one: Dataset, other: Dataset) -> None:
    for left, right in ((one.train, other.train), (one.test, other.test)):
        assert all(torch.equal(a, b) for a, b in zip(left.inputs, right.inputs, strict=True))
        assert torch.equal(left.targets, right.targets)
    assert one.num_outputs == other.num_outputs


def in_memory(source: Npz, root: Path) -> Dataset:
    return prepared.load("npz", source, root, prepares=False, embedded=True)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "prepared").iterdir())


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def leftover_name(root: Path, pid: int, host: str = "") -> Path:
    return root / "prepared" / f".npz-0123.tmp-{host or socket.gethostname()}-{pid}"


# --- what the tensors are


def test_tensors_are_normalised_and_channels_last(tmp_path: Path) -> None:
    source = write_npz(tmp_path)
    arrays = source.load()
    dataset = load(source, tmp_path)
    expected = (arrays.train_images / 255.0 - np.array(arrays.mean)) / np.array(arrays.std)
    assert torch.allclose(dataset.train.inputs[0].permute(0, 2, 3, 1), torch.from_numpy(expected).float(), atol=1e-6)
    assert dataset.train.inputs[0].shape == (30, 3, 6, 5)
    assert dataset.train.inputs[0].stride() == (90, 1, 15, 3)
    assert dataset.train.inputs[0].dtype == torch.float32
    assert dataset.train.targets.tolist() == arrays.train_labels.tolist()
    assert dataset.input_shape == (3, 6, 5)
    assert dataset.num_outputs == 4


def test_mapped_equals_in_memory(tmp_path: Path) -> None:
    source = write_npz(tmp_path, num=2500)  # several chunks
    assert_same(load(source, tmp_path), in_memory(source, tmp_path))


def test_to_keeps_values_and_strides(tmp_path: Path) -> None:
    dataset = in_memory(write_npz(tmp_path), tmp_path)
    moved = dataset.to("meta")
    assert moved.train.inputs[0].stride() == dataset.train.inputs[0].stride()
    assert moved.test.targets.device.type == "meta"
    same = dataset.to(torch.device("cpu"))
    assert same.train.inputs[0].data_ptr() == dataset.train.inputs[0].data_ptr()


def test_embedded_writes_nothing(tmp_path: Path) -> None:
    source = Digits(tmp_path, False, 0)
    dataset = prepared.load("digits", source, tmp_path, prepares=True, embedded=source.embedded)
    assert dataset.input_shape == (1, 8, 8)
    assert dataset.train.inputs[0].mean() == pytest.approx(0, abs=1e-5)
    assert dataset.train.inputs[0].std() == pytest.approx(1, abs=1e-3)
    assert not list(tmp_path.iterdir())


def test_float_images_in_their_units_are_not_copied() -> None:
    images = np.zeros((2, 3, 3, 1), np.float32)
    assert prepared.normalised(images, (0.0,), (1.0,)) is images
    assert prepared.normalised(images, (1.0,), (1.0,)) is not images


def test_writing_to_the_tensors_does_not_change_the_files(tmp_path: Path) -> None:
    source = write_npz(tmp_path)
    dataset = load(source, tmp_path)
    before = dataset.train.inputs[0].clone()
    dataset.train.inputs[0].zero_()
    assert torch.equal(load(source, tmp_path).train.inputs[0], before)


# --- clients


def test_client_ids_survive_preparation(tmp_path: Path) -> None:
    source = write_npz(tmp_path, train_clients=np.repeat([70, 5, 12], 10))
    expected = [2] * 10 + [0] * 10 + [1] * 10
    for dataset in (load(source, tmp_path), load(source, tmp_path, prepares=False), in_memory(source, tmp_path)):
        assert dataset.train.clients.dtype == torch.int64
        assert dataset.train.clients.tolist() == expected
        assert dataset.to("meta").train.clients.tolist() == expected


def test_without_client_ids_there_are_none(tmp_path: Path) -> None:
    source = write_npz(tmp_path)
    assert load(source, tmp_path).train.clients is None
    assert in_memory(source, tmp_path).train.clients is None


def test_a_folder_without_its_client_ids_is_damaged(tmp_path: Path) -> None:
    source = write_npz(tmp_path, train_clients=np.arange(30))
    load(source, tmp_path)
    (path,) = (tmp_path / "prepared").glob("*/train_clients.npy")
    path.write_bytes(path.read_bytes()[:-8])
    assert load(source, tmp_path).train.clients.tolist() == list(range(30))


def test_as_many_client_ids_as_samples(tmp_path: Path) -> None:
    source = write_npz(tmp_path, train_clients=np.arange(29))
    with pytest.raises(ValueError, match=r"data.dataset: npz: train has 30 images but 29 client ids; they must be as"):
        load(source, tmp_path)
    assert not (tmp_path / "prepared").exists()


# --- made once


def test_second_load_reads_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_npz(tmp_path)
    first = load(source, tmp_path)
    monkeypatch.setattr(Npz, "load", lambda self: pytest.fail("read again"))
    assert_same(load(source, tmp_path), first)
    assert_same(load(source, tmp_path, prepares=False), first)


def test_a_changed_file_is_prepared_again(tmp_path: Path) -> None:
    source = write_npz(tmp_path)
    load(source, tmp_path)
    write_npz(tmp_path, num=31)
    assert len(load(source, tmp_path).train.targets) == 31
    assert len(folders(tmp_path)) == 2


def digest(dataset: Dataset) -> str:
    parts = [part for split in (dataset.train, dataset.test) for part in (*split.inputs, split.targets)]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def prepare_at_once(root: Path, barrier: Barrier, answers: multiprocessing.Queue) -> None:
    source = DATASETS["npz"].build(root, False, 0, path=root / "x.npz")
    barrier.wait(60)
    answers.put(digest(load(source, root)))


def test_two_nodes_and_a_waiting_rank_at_once(tmp_path: Path) -> None:
    source = write_npz(tmp_path, num=3000)
    barrier, answers = PROCESSES.Barrier(3), PROCESSES.Queue()
    nodes = [PROCESSES.Process(target=prepare_at_once, args=(tmp_path, barrier, answers)) for _ in range(2)]
    for node in nodes:
        node.start()
    barrier.wait(60)
    waited = digest(load(source, tmp_path, prepares=False))
    got = [answers.get(timeout=60) for _ in nodes]
    for node in nodes:
        node.join(60)
    assert [node.exitcode for node in nodes] == [0, 0]
    assert {waited, *got} == {digest(in_memory(source, tmp_path))}
    assert len(folders(tmp_path)) == 1


def test_loser_of_the_race_takes_the_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_npz(tmp_path)
    write, inodes = prepared._write, []

    def write_while_another_node_wins(folder: Path, arrays: Arrays) -> None:
        write(folder, arrays)
        monkeypatch.setattr(prepared, "_write", write)
        other = folder.with_name(folder.name.removeprefix(".").partition(".tmp-")[0])
        write(other, arrays)
        inodes.append(other.stat().st_ino)

    monkeypatch.setattr(prepared, "_write", write_while_another_node_wins)
    load(source, tmp_path)
    (name,) = folders(tmp_path)
    assert (tmp_path / "prepared" / name).stat().st_ino == inodes[0]


# --- damage


def truncate(folder: Path) -> None:
    path = folder / "train_inputs_0.npy"
    path.write_bytes(path.read_bytes()[:-4])


def zero(folder: Path) -> None:
    """As a crash of the machine may leave a file whose size was known already."""
    path = folder / "train_inputs_0.npy"
    path.write_bytes(bytes(path.stat().st_size))


def remove(folder: Path) -> None:
    (folder / "test_targets.npy").unlink()


def empty_meta(folder: Path) -> None:
    (folder / "meta.json").write_text("")


def meta_without_parts(folder: Path) -> None:
    (folder / "meta.json").write_text(json.dumps({"facts": {}, "sizes": {}}))


def foreign_meta(folder: Path) -> None:
    (folder / "meta.json").write_text("[1]")


@pytest.mark.parametrize("damage", [truncate, zero, remove, empty_meta, meta_without_parts, foreign_meta])
def test_a_damaged_folder_is_made_again(tmp_path: Path, damage) -> None:
    source = write_npz(tmp_path)
    first = load(source, tmp_path)
    expected = in_memory(source, tmp_path)
    assert_same(first, expected)
    (name,) = folders(tmp_path)
    damage(tmp_path / "prepared" / name)
    assert_same(load(source, tmp_path), expected)
    assert folders(tmp_path) == [name]
    assert json.loads((tmp_path / "prepared" / name / "meta.json").read_text())["facts"]["num_outputs"] == 4


def load_and_die(root: Path) -> None:
    prepared._install = lambda temporary, folder: os.kill(os.getpid(), signal.SIGKILL)
    load(DATASETS["npz"].build(root, False, 0, path=root / "x.npz"), root)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    source = write_npz(tmp_path)
    process = PROCESSES.Process(target=load_and_die, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    (left,) = folders(tmp_path)
    assert left.endswith(f".tmp-{socket.gethostname()}-{process.pid}")
    assert_same(load(source, tmp_path), in_memory(source, tmp_path))
    (name,) = folders(tmp_path)
    assert not name.startswith(".")


def test_folders_of_the_living_and_of_other_hosts_stay(tmp_path: Path) -> None:
    source = write_npz(tmp_path)
    stay = [leftover_name(tmp_path, os.getppid()), leftover_name(tmp_path, dead_pid(), "other-host")]
    go = leftover_name(tmp_path, dead_pid())
    for folder in (*stay, go):
        folder.mkdir(parents=True)
    load(source, tmp_path)
    assert [folder.exists() for folder in (*stay, go)] == [True, True, False]


def test_full_disk_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_npz(tmp_path)

    def full(path: Path, *rest: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepared, "_write_images", full)
    with pytest.raises(OSError, match=r"data.root: cannot write .*No space left.*it takes 0 MB.*Free") as caught:
        load(source, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert folders(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_device_is_an_oserror_with_its_number(tmp_path: Path) -> None:
    images = np.zeros((2000, 8, 8, 3), np.uint8)
    with pytest.raises(OSError, match="No space left") as caught:
        prepared._write_images(Path("/dev/full"), images, (0.0,) * 3, (1.0,) * 3)
    assert caught.value.errno == errno.ENOSPC


# --- waiting


def test_missing_files_end_the_wait_when_nobody_downloads(tmp_path: Path) -> None:
    source = DATASETS["npz"].build(tmp_path, False, 0, path="missing.npz")
    for prepares in (True, False):
        with pytest.raises(DatasetNotFoundError):
            load(source, tmp_path, prepares)


def test_waiting_for_a_download_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = DATASETS["npz"].build(tmp_path, False, 0, path=tmp_path / "x.npz")
    monkeypatch.setattr(Npz, "download", True)
    monkeypatch.setattr(prepared, "_SAY_WHAT_FOR_AFTER_S", 0.5)
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 10:
            load(write_npz(tmp_path), tmp_path)

    monkeypatch.setattr(prepared.time, "sleep", nap)
    monkeypatch.setattr(prepared.time, "monotonic", lambda: len(naps) * 0.2)
    with caplog.at_level(logging.WARNING):
        dataset = load(source, tmp_path, prepares=False)
    assert len(dataset.train.targets) == 30
    assert naps == [0.2] * 10
    assert [record.message for record in caplog.records] == [
        f"waiting for the first rank of this node to prepare npz in {tmp_path / 'prepared'}"
    ]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_the_images_are_the_mapped_file(tmp_path: Path) -> None:
    dataset = load(write_npz(tmp_path), tmp_path)
    (path,) = (tmp_path / "prepared").glob("*/train_inputs_0.npy")
    (line,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path)))
    start, stop = (int(address, 16) for address in line.split()[0].split("-"))
    assert start <= dataset.train.inputs[0].data_ptr() < stop
