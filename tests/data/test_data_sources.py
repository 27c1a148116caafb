"""Readers of data sets: what they give, and what they say about files that are missing or not sound."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tracemalloc
import urllib.error
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedspec_dist.config.methods import DATASETS
from fedspec_dist.data import prepared
from fedspec_dist.data.files import DatasetNotFoundError
from fedspec_dist.data.images import fashion_mnist
from fedspec_dist.data.images.arrays import Arrays, channel_statistics
from fedspec_dist.data.images.cifar import Cifar10, Cifar100
from fedspec_dist.data.images.digits import Digits
from fedspec_dist.data.images.fashion_mnist import FashionMnist
from fedspec_dist.data.images.synthetic import Synthetic
from fedspec_dist.data.unpickle import load_plain_pickle

RNG = np.random.default_rng(0)
IMAGES = {"train_images": 9, "test_images": 4}


def random_images(*shape: int) -> np.ndarray:
    return RNG.integers(256, size=shape, dtype=np.uint8)


# --- embedded


def test_digits(tmp_path: Path) -> None:
    arrays = Digits(tmp_path, False, 0).load()
    arrays.check("digits")
    assert arrays.train_images.shape == (1437, 8, 8, 1)
    assert arrays.test_images.shape == (360, 8, 8, 1)
    assert np.bincount(arrays.test_labels).tolist() == [36] * 10
    assert arrays.train_images.max() == 1.0
    assert set(np.unique(arrays.train_images * 16)) == set(range(17))
    assert arrays.mean[0] == pytest.approx(arrays.train_images.mean(), rel=1e-5)
    train = {image.tobytes() for image in arrays.train_images}
    assert not any(image.tobytes() in train for image in arrays.test_images)


def test_digits_are_those_of_scikit_learn(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    arrays = Digits(tmp_path, False, 0).load()
    ours = np.concatenate([arrays.train_images, arrays.test_images]).reshape(-1, 64) * 16
    labelled = np.column_stack([ours, np.concatenate([arrays.train_labels, arrays.test_labels])])
    theirs = np.column_stack(datasets.load_digits(return_X_y=True))
    assert sorted(map(tuple, labelled.tolist())) == sorted(map(tuple, theirs.tolist()))


def test_synthetic(tmp_path: Path) -> None:
    def make(seed: int) -> Arrays:
        return Synthetic(tmp_path, False, seed, shape=[3, 16, 12], num_classes=7, num_train=2100, num_test=70).load()

    arrays = make(5)
    arrays.check("synthetic")
    assert arrays.train_images.shape == (2100, 16, 12, 3)
    assert arrays.train_images.dtype == np.float32
    assert np.bincount(arrays.train_labels).tolist() == [300] * 7
    assert arrays.train_images.std() == pytest.approx(1, abs=0.02)
    assert np.array_equal(arrays.test_images, make(5).test_images)
    assert not np.array_equal(arrays.test_images, make(6).test_images)


def test_synthetic_classes_can_be_told_apart(tmp_path: Path) -> None:
    """By their spectrum's size, which shifts do not change: the nearest class mean is far better than chance."""
    arrays = DATASETS["synthetic"].build(tmp_path, False, 0, shape=(1, 16, 16), num_train=1000, num_test=500).load()
    train, test = (
        np.abs(np.fft.rfft2(images[..., 0]))[:, :4, :4].reshape(len(images), -1)
        for images in (arrays.train_images, arrays.test_images)
    )
    means = np.stack([train[arrays.train_labels == label].mean(axis=0) for label in range(10)])
    nearest = np.square(test[:, None] - means).sum(axis=2).argmin(axis=1)
    assert np.mean(nearest == arrays.test_labels) > 0.4


# --- checks on arrays


def arrays_with(**changes: object) -> Arrays:
    fields = {
        "train_images": random_images(5, 4, 4, 1),
        "train_labels": np.arange(5),
        "test_images": random_images(2, 4, 4, 1),
        "test_labels": np.arange(2),
        "num_classes": 5,
        "mean": (0.5,),
        "std": (0.2,),
    }
    return Arrays(**{**fields, **changes})


def test_sound_arrays_pass() -> None:
    arrays_with().check("mine")


def nan_at(index: int) -> np.ndarray:
    images = np.zeros((5, 4, 4, 1), np.float32)
    images[index, 2, 1, 0] = np.nan
    return images


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.array([0, 1, 5, 2, 9])}, r"mine: train label at index 2 is 5; allowed is 0\.\.4"),
        ({"test_labels": np.array([0, -1])}, r"mine: test label at index 1 is -1; allowed is 0\.\.4"),
        ({"train_labels": np.arange(4)}, "train has 5 images but 4 labels"),
        ({"train_clients": np.arange(6)}, "train has 5 images but 6 client ids"),
        ({"test_images": random_images(0, 4, 4, 1), "test_labels": np.arange(0)}, "test is empty"),
        ({"train_images": nan_at(3)}, "train image at index 3 has a value that is not finite"),
        ({"test_images": random_images(2, 5, 4, 1)}, r"train images are \(4, 4, 1\) but test .* \(5, 4, 1\)"),
    ],
)
def test_unsound_arrays(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrays_with(**changes).check("mine")


def test_channel_statistics() -> None:
    images = random_images(1500, 4, 3, 2)
    images[..., 1] = 7
    mean, std = channel_statistics(images)
    assert mean == pytest.approx([(images[..., 0] / 255).mean(), 7 / 255])
    assert std == pytest.approx([(images[..., 0] / 255).std(), 1.0])


# --- Fashion-MNIST


@pytest.fixture
def no_debian_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fashion_mnist, "_DEBIAN_FOLDER", tmp_path / "debian")


def write_idx(path: Path, array: np.ndarray) -> None:
    sizes = np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))


def write_fashion(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = random_images(12, 28, 28), RNG.integers(10, size=12, dtype=np.uint8)
    write_idx(folder / "train-images-idx3-ubyte.gz", images[:8])
    write_idx(folder / "train-labels-idx1-ubyte.gz", labels[:8])
    write_idx(folder / "t10k-images-idx3-ubyte.gz", images[8:])
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", labels[8:])
    return images, labels


@pytest.mark.usefixtures("no_debian_package")
@pytest.mark.parametrize("place", ["root", "root/FashionMNIST/raw", "debian"])
def test_fashion_mnist_in_each_place(tmp_path: Path, place: str) -> None:
    images, labels = write_fashion(tmp_path / place)
    arrays = FashionMnist(tmp_path / "root", False, 0).load()
    arrays.check("fashion_mnist")
    assert np.array_equal(arrays.train_images[..., 0], images[:8])
    assert np.array_equal(arrays.test_labels, labels[8:])


def test_a_folder_is_no_npz_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data\.path: got .*, which is a folder; give the \.npz file in it"):
        DATASETS["npz"].build(tmp_path, False, 0, path=tmp_path).load()


@pytest.mark.usefixtures("no_debian_package")
def test_missing_fashion_mnist_names_places_and_command(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"Get it with: python -c \"from torchvision") as caught:
        FashionMnist(tmp_path / "root", False, 0).load()
    for place in ("root,", "root/FashionMNIST/raw", "debian"):
        assert str(tmp_path / place) in str(caught.value)


@pytest.mark.usefixtures("no_debian_package")
def test_failed_download_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FashionMnist, root: Path) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(FashionMnist, "_fetch", fail)
    with pytest.raises(DatasetNotFoundError, match=r"Downloading it failed: .*no route to host.*internet"):
        FashionMnist(tmp_path, True, 0).load()


@pytest.mark.usefixtures("no_debian_package")
def test_download_is_used_once_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FashionMnist, "_fetch", lambda self, root: write_fashion(root / "FashionMNIST/raw"))
    assert len(FashionMnist(tmp_path, True, 0).load().train_labels) == 8
    monkeypatch.setattr(FashionMnist, "_fetch", lambda self, root: pytest.fail("downloaded again"))
    assert len(FashionMnist(tmp_path, True, 0).load().train_labels) == 8


@pytest.mark.usefixtures("no_debian_package")
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-20],
        lambda content: content[:30] + b"??????" + content[36:],
        lambda content: b"<html>not found</html>",
        lambda content: gzip.compress(gzip.decompress(content)[:-1]),
        lambda content: gzip.compress(b"\0\0\x08"),
        lambda content: gzip.compress(b"\0\0\x0d" + gzip.decompress(content)[3:]),
        lambda content: b"",
    ],
)
def test_damaged_idx_file_is_named(tmp_path: Path, damage) -> None:
    write_fashion(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"cannot read {path}: .*Delete it and get the data set again: python -c"):
        FashionMnist(tmp_path, False, 0).load()


# --- CIFAR


def python2_batch(rows: np.ndarray, labels: list[int], label_key: str) -> bytes:
    """The bytes that Python 2 wrote the official files in: text keys, old numpy names, data as a string."""
    raw = rows.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + (b"M" + len(rows).to_bytes(2, "little") + b"M\x00\x0c\x86")
        + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + (b"T" + len(raw).to_bytes(4, "little") + raw + b"tb")
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    key = label_key.encode()
    return b"\x80\x02}(U\x04data" + array + b"U" + bytes([len(key)]) + key + numbers + b"u."


def write_cifar10(root: Path, write) -> tuple[np.ndarray, list[int]]:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images = random_images(18, 32, 32, 3)
    labels = RNG.integers(10, size=18).tolist()
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for i, name in enumerate(names):
        rows = images[3 * i : 3 * i + 3].transpose(0, 3, 1, 2).reshape(3, 3072)
        (folder / name).write_bytes(write(rows, labels[3 * i : 3 * i + 3]))
    return images, labels


def python3_batch(protocol: int, as_bytes: bool):
    def write(rows: np.ndarray, labels: list[int]) -> bytes:
        batch = {"data": rows, "labels": labels, "batch_label": "b"}
        named = {key.encode(): value for key, value in batch.items()} if as_bytes else batch
        return pickle.dumps(named, protocol=protocol)

    return write


@pytest.mark.parametrize(
    "write",
    [
        lambda rows, labels: python2_batch(rows, labels, "labels"),
        *(python3_batch(protocol, True) for protocol in range(6)),
        python3_batch(4, False),
        lambda rows, labels: python3_batch(5, True)(np.asfortranarray(rows), labels),
        lambda rows, labels: python3_batch(2, True)(np.asfortranarray(rows), labels),
    ],
)
def test_cifar10(tmp_path: Path, write) -> None:
    images, labels = write_cifar10(tmp_path, write)
    arrays = Cifar10(tmp_path, False, 0).load()
    arrays.check("cifar10")
    assert np.array_equal(arrays.train_images, images[:15])
    assert np.array_equal(arrays.test_images, images[15:])
    assert arrays.train_labels.tolist() == labels[:15]
    assert arrays.test_labels.dtype == np.int64


def test_cifar100_reads_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / name).write_bytes(python2_batch(random_images(2, 3072), [7, 99], "fine_labels"))
    arrays = Cifar100(tmp_path, False, 0).load()
    assert arrays.train_labels.tolist() == [7, 99]
    assert arrays.num_classes == 100


def test_missing_cifar_names_place_and_command(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match="import CIFAR100; CIFAR100") as caught:
        Cifar100(tmp_path, False, 0).load()
    assert str(tmp_path / "cifar-100-python") in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated or no pickle"),
        (b"<html>", "plain pickle|no pickle"),
        (pickle.dumps([1, 2]), "a list, not the dictionary"),
        (pickle.dumps({"labels": [1]}), "'data' is not an array of bytes"),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}), "arrays of type 'f8' are not allowed"),
        (pickle.dumps({"data": random_images(1, 3072), "labels": "x"}), "'labels' is not a list of integers"),
        (pickle.dumps({"data": random_images(1, 3071), "labels": [1]}), "3072 columns"),
        (pickle.dumps({"data": random_images(1, 3072), "labels": [1]})[:2000], "truncated"),
    ],
)
def test_foreign_batches_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    write_cifar10(tmp_path, lambda rows, labels: content)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    with pytest.raises(ValueError, match=rf"cannot read {path}: .*({reason}).*Delete it"):
        Cifar10(tmp_path, False, 0).load()


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace", tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": Malicious(trace)}))
    with pytest.raises(ValueError, match=r"it asks to run (posix|os)\.system"):
        load_plain_pickle(path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # the pickle does bite where nothing stops it


@pytest.mark.parametrize("name", ["builtins\neval", "builtins\ngetattr", "numpy\nload", "_codecs\ndecode"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "batch"
    path.write_bytes(f"c{name}\n.".encode())
    with pytest.raises(ValueError, match="it asks to run"):
        load_plain_pickle(path)


# --- npz


def write_npz(path: Path, **changes: object) -> dict[str, np.ndarray]:
    content = {
        "train_images": random_images(9, 6, 5),
        "train_labels": (np.arange(9) % 3).astype(np.uint8)[:, None],
        "val_images": random_images(1, 6, 5),
        "val_labels": np.zeros((1, 1), np.uint8),
        "test_images": random_images(4, 6, 5),
        "test_labels": np.zeros((4, 1), np.uint8),
        **changes,
    }
    np.savez_compressed(path, **{key: value for key, value in content.items() if value is not None})
    return content


def test_npz_grey_with_a_column_of_labels(tmp_path: Path) -> None:
    content = write_npz(tmp_path / "grey.npz")
    source = DATASETS["npz"].build(tmp_path, False, 0, path="grey.npz")
    arrays = source.load()
    arrays.check("npz")
    assert np.array_equal(arrays.train_images[..., 0], content["train_images"])
    assert arrays.train_labels.tolist() == [0, 1, 2] * 3
    assert arrays.num_classes == 3
    assert arrays.mean == pytest.approx([(content["train_images"] / 255).mean()])


def test_npz_colour_floats_and_flat_labels(tmp_path: Path) -> None:
    write_npz(
        tmp_path / "colour.npz",
        train_images=RNG.random((9, 6, 5, 3)),
        test_images=RNG.random((4, 6, 5, 3), dtype=np.float32),
        train_labels=np.arange(9),
    )
    source = DATASETS["npz"].build(Path("elsewhere"), False, 0, path=tmp_path / "colour.npz", num_classes=12)
    arrays = source.load()
    arrays.check("npz")
    assert arrays.train_images.dtype == np.float32
    assert arrays.num_classes == 12
    assert len(arrays.mean) == 3


@pytest.mark.parametrize(
    "ids",
    [
        np.array([9, 9, -4, 9, 2**60, -4, 2**60, 9, 9]),
        np.array([9, 9, 4, 9, 200, 4, 200, 9, 9], np.uint8)[:, None] + np.uint8(1),
        np.array(["f2", "f2", "f10", "f2", "g", "f10", "g", "f2", "f2"]),
        np.array([b"b", b"b", b"", b"b", b"cc", b"", b"cc", b"b", b"b"])[:, None],
    ],
)
def test_npz_numbers_client_ids(tmp_path: Path, ids: np.ndarray) -> None:
    write_npz(tmp_path / "x.npz", train_clients=ids)
    arrays = DATASETS["npz"].build(tmp_path, False, 0, path="x.npz").load()
    arrays.check("npz")
    assert arrays.train_clients.dtype == np.int64
    assert arrays.train_clients.tolist() == [1, 1, 0, 1, 2, 0, 2, 1, 1]


def test_npz_client_ids_that_are_objects_are_refused(tmp_path: Path) -> None:
    write_npz(tmp_path / "x.npz", train_clients=np.array(["a"] * 9, dtype=object))
    with pytest.raises(ValueError, match=r"x.npz: train_clients has dtype object, as .* pandas .*dtype=str") as caught:
        DATASETS["npz"].build(tmp_path, False, 0, path="x.npz").load()
    assert "elete" not in str(caught.value)  # the user's own file


def test_npz_label_beyond_the_classes(tmp_path: Path) -> None:
    write_npz(tmp_path / "x.npz", test_labels=np.array([0, 2, 3, 1]))
    with pytest.raises(ValueError, match=r"test_labels has label 3 at index 2, .*; give data\.num_classes=4"):
        prepared.load(
            "npz",
            DATASETS["npz"].build(tmp_path, False, 0, path="x.npz"),
            tmp_path / "root",
            prepares=True,
            embedded=False,
        )
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_labels": None}, r"data.path: .*x.npz has no test_labels; it needs train_images, .* and has train"),
        ({"train_labels": np.zeros((9, 2), int)}, r"train_labels has shape \(9, 2\) .*several labels"),
        ({"train_labels": np.zeros(9)}, "train_labels has shape .* and type float64"),
        ({"train_images": random_images(9, 6, 6, 6)}, r"train_images has shape \(9, 6, 6, 6\); allowed"),
        ({"train_images": np.zeros((9, 6, 5), int)}, "train_images has type int64; allowed: uint8 or float"),
        ({"train_clients": np.zeros(9)}, r"train_clients has shape \(9,\) and type float64; allowed: integers or str"),
        ({"train_clients": np.zeros((9, 2), int)}, r"train_clients has shape \(9, 2\) and type int64"),
        ({"train_clients": np.int64(3)}, r"train_clients has shape \(\) and type int64"),
    ],
)
def test_npz_of_another_form(tmp_path: Path, changes: dict, message: str) -> None:
    write_npz(tmp_path / "x.npz", **changes)
    with pytest.raises(ValueError, match=message):
        DATASETS["npz"].build(tmp_path, False, 0, path="x.npz").load()


def test_npz_damaged_or_foreign(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    write_npz(path)
    whole = path.read_bytes()
    for content in (whole[:-50], whole[:90] + b"\xff" * 40 + whole[130:], b"", b"nonsense"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"cannot read {path}: .*Is it whole\? If not, write it again"):
            DATASETS["npz"].build(tmp_path, False, 0, path="x.npz").load()


def npy_header(shape: tuple[int, ...], descr: str) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


HOSTILE = {
    "labels of a million": (
        {"train_labels": np.arange(9) + 10**6},
        "9 classes, numbered 1000000 to 1000008, .*renumber",
    ),
    "labels of 2^62": ({"train_labels": np.arange(9) + 2**62}, "would make 4611686018427387913 outputs; .*renumber"),
    "labels of 2^64": ({"train_labels": np.arange(9, dtype=np.uint64) + np.uint64(2**64 - 9)}, "allowed: below 2\\^63"),
    "sparse labels": ({"train_labels": np.arange(9) * 2000 + 1000}, "9 classes, .*1000 to 17000.*num_classes=17001"),
    "negative labels": ({"train_labels": np.arange(9) - 3}, "train label at index 0 is -3"),
    "only negative labels": ({"train_labels": np.full(9, -1), "test_labels": np.full(4, -1)}, "index 0 is -1"),
    "labels with a nan": ({"train_labels": np.full(9, np.nan)}, "type float64; allowed: integers"),
    "labels that are text": ({"train_labels": np.array(["cat"] * 9)}, "type <U3; allowed: integers"),
    "no labels": ({"train_labels": np.zeros(0, int)}, "train_labels is empty"),
    "no test images": ({"test_images": random_images(0, 6, 5)}, "test_images is empty"),
    "a single number": ({"train_images": np.float32(3)}, r"train_images has shape \(\)"),
    "zero height": ({"train_images": random_images(9, 0, 5)}, r"shape \(9, 0, 5, 1\); allowed: a height"),
    "a nan": ({"train_images": np.full((9, 6, 5), np.nan)}, "image at index 0 has a value that is not finite"),
    "objects": ({"train_images": np.array([object()] * 9, dtype=object)}, "train_images has dtype object"),
    "bytes and floats up to 255": ({"test_images": random_images(4, 6, 5).astype(float)}, "range from 0 to 1 .*from"),
    "floats up to 255 and bytes": (
        {"train_images": random_images(9, 6, 5).astype(float)},
        "train images range from 0 to 255 .* test .*uint8, divided by 255",
    ),
    "floats of two scales": (
        {"train_images": RNG.random((9, 6, 5)), "test_images": 255 * RNG.random((4, 6, 5))},
        "must be in the same units",
    ),
    "one more client id": ({"train_clients": np.arange(10)}, "9 images but 10 client ids"),
}
MEMBERS = {
    "ten terabytes": (npy_header((10**7, 1000, 1000), "|u1") + b"x", "announces 10000000x1000x1000 of uint8"),
    "negative sizes": (npy_header((-9, -6, 5), "|u1") + bytes(270), "announces -9x-6x5"),
    "too little": (npy_header((9, 6, 5), "|u1") + bytes(269), "announces 9x6x5 of uint8, 270 bytes, but holds 269"),
    "text": (b"hello", "train_images is damaged or no array"),
    "nothing": (b"", "train_images is damaged or no array"),
    "a header that is no header": (npy_header((9,), "|u1").replace(b"fortran_order", b"fortran-order"), "no array"),
    "a header that runs code": (b"\x93NUMPY\x01\x00\x20\x00" + b"__import__('os').getcwd()".ljust(32), "no array"),
    "another version": (b"\x93NUMPY\x09\x00" + bytes(200), "no array"),
    "a bomb": (npy_header((1, 2**14, 2**14 + 1), "|u1") + bytes(2**28 + 2**14), "grows from 0.3 MB to 268 MB"),
}


@pytest.mark.parametrize("case", [*HOSTILE, *MEMBERS])
def test_one_message_about_an_npz_that_is_not_sound(case: str, tmp_path: Path) -> None:
    changes, message = HOSTILE.get(case) or ({"train_images": None}, MEMBERS[case][1])
    write_npz(tmp_path / "x.npz", **changes)
    if case in MEMBERS:
        with zipfile.ZipFile(tmp_path / "x.npz", "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("train_images.npy", MEMBERS[case][0])
    source = DATASETS["npz"].build(tmp_path, False, 0, path="x.npz")
    tracemalloc.start()
    with pytest.raises(ValueError, match=message) as caught:
        prepared.load("npz", source, tmp_path / "root", prepares=True, embedded=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "data." in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert "elete" not in str(caught.value)
    assert peak < 50e6


@pytest.mark.parametrize("dtype", ["|u1", ">f4", "<f8", "<f2"])
def test_arrays_in_fortran_order_or_of_another_byte_order_are_the_same_data(tmp_path: Path, dtype: str) -> None:
    content = {key: RNG.integers(256, size=(num, 6, 5, 3)).astype(dtype) for key, num in IMAGES.items()}
    labels = {"train_labels": np.arange(9) % 3, "test_labels": np.arange(4) % 3}
    found = []
    for order, byte_order in (("C", "<"), ("F", ">")):
        path = tmp_path / f"{order}.npz"
        swapped = {key: value.astype(value.dtype.newbyteorder(byte_order)) for key, value in labels.items()}
        np.savez(path, **{key: np.array(value, order=order) for key, value in content.items()}, **swapped)
        dataset = prepared.load(
            "npz", DATASETS["npz"].build(tmp_path, False, 0, path=path), tmp_path, prepares=True, embedded=False
        )
        found.append((dataset.train.inputs[0], dataset.test.inputs[0], dataset.train.targets, dataset.test.targets))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_labels_with_gaps_are_numbered_when_asked(tmp_path: Path) -> None:
    labels = np.array([1000, 19001, -5, 1000, 7000, 7000, -5, 19001, 1000])
    write_npz(tmp_path / "x.npz", train_labels=labels, test_labels=np.array([7000, -5, 1000, 1000]))
    source = DATASETS["npz"].build(tmp_path, False, 0, path="x.npz", renumber=True)
    arrays = source.load()
    arrays.check("npz")
    assert arrays.train_labels.tolist() == [1, 3, 0, 1, 2, 2, 0, 3, 1]
    assert arrays.test_labels.tolist() == [2, 0, 1, 1]
    assert arrays.num_classes == 4
    assert source.fingerprint() != DATASETS["npz"].build(tmp_path, False, 0, path="x.npz").fingerprint()
    write_npz(tmp_path / "x.npz", train_labels=labels, test_labels=np.array([7000, 8, 1000, 1000]))
    with pytest.raises(ValueError, match=r"data\.renumber: .*label 8 at index 1, which no training sample has"):
        DATASETS["npz"].build(tmp_path, False, 0, path="x.npz", renumber=True).load()


def test_bytes_and_floats_between_0_and_1_are_of_one_scale(tmp_path: Path) -> None:
    bytes_ = random_images(9, 6, 5)
    write_npz(tmp_path / "x.npz", train_images=bytes_, test_images=bytes_[:4] / 255)
    arrays = DATASETS["npz"].build(tmp_path, False, 0, path="x.npz").load()
    arrays.check("npz")


def test_missing_npz_names_places_and_command(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"bloodmnist\.npz, .*curl .*bloodmnist\.npz") as caught:
        DATASETS["npz"].build(tmp_path, True, 0, path="bloodmnist.npz").load()
    assert str(tmp_path / "bloodmnist.npz") in str(caught.value)


def test_an_npz_of_the_users_own_is_not_looked_for_at_medmnist(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"Get it with: cp YOUR/mine\.npz .*full path as data\.path$"):
        DATASETS["npz"].build(tmp_path, True, 0, path="mine.npz").load()


# --- all


def test_fingerprints_change_with_the_content_of_files_and_with_nothing_else(tmp_path: Path) -> None:
    write_cifar10(tmp_path, python3_batch(4, True))
    source = Cifar10(tmp_path, False, 0)
    before = source.fingerprint()
    assert Cifar10(tmp_path, True, 1).fingerprint() == before
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    os.utime(path, ns=(1, 1))
    assert source.fingerprint() == before  # the times of a file say nothing of what is in it
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    assert source.fingerprint() != before


def test_fingerprint_of_a_missing_set_never_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cifar10, "_fetch", lambda self, root: pytest.fail("downloaded"))
    with pytest.raises(DatasetNotFoundError):
        Cifar10(tmp_path, True, 0).fingerprint()


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_source_has_the_same_interface(name: str, tmp_path: Path) -> None:
    values = {"path": "x", "name": "MNIST", "target": "y"}
    taken = DATASETS[name].parameters
    parameters = {
        key: value for key, value in values.items() if key in taken and (taken[key][1] is ... or key == "path")
    }
    source = DATASETS[name].build(tmp_path, False, 0, **parameters)
    assert source.embedded == (name in ("digits", "synthetic"))
    assert source.download is False
    assert callable(source.load)
    assert callable(source.fingerprint)
