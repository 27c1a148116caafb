"""Data as people have them: each kind of file read as it should be, and told in one sentence when it is not sound."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedspec_dist.config.methods import DATASETS
from fedspec_dist.data.raw import RawData, Split
from fedspec_dist.data.text.tokens import IGNORED
from fedspec_dist.rounds.loading import load_federation
from tests.rounds.jobs import run_job, tiny

CSV = "age,city,who,price\n" + "".join(f"{20 + n},{'ab'[n % 2]}town,u{n % 3},{1.5 * n}\n" for n in range(30))
TEXTS = [{"text": f"the {w} film, no {n}", "label": y, "user": f"u{n % 4}"} for n, (w, y) in enumerate(
    [("good", "yes"), ("bad", "no"), ("fine", "yes"), ("dull", "no")] * 6)]  # fmt: skip


def source(kind: str, root: Path, **settings: Any) -> Any:
    defaults = {key: default for key, (_, default) in DATASETS[kind].parameters.items() if default is not ...}
    return DATASETS[kind].build(root=root, download=False, seed=0, **{**defaults, **settings})


def checked(kind: str, root: Path, **settings: Any) -> RawData:
    made = source(kind, root, **settings)
    raw = made.load()
    raw.check(kind)
    assert made.fingerprint() == source(kind, root, **settings).fingerprint()
    return raw


def write_images(folder: Path, sizes: tuple[int, ...] = (8,), suffix: str = "png") -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for n in range(count):
                size = sizes[n % len(sizes)]
                Image.fromarray(rng.integers(255, size=(size, size, 3), dtype=np.uint8)).save(
                    folder / split / name / f"{n}.{suffix}"
                )


def write_leaf(folder: Path, x: Callable[[int], Any], y: Callable[[int], Any]) -> None:
    for split, users in (("train", ["ann", "bob", "eve"]), ("test", ["eve", "ann"])):
        (folder / split).mkdir(parents=True)
        data = {user: {"x": [x(n) for n in range(4)], "y": [y(n) for n in range(4)]} for user in users}
        content = {"users": users, "num_samples": [4] * len(users), "user_data": data}
        (folder / split / "all.json").write_text(json.dumps(content))


def test_a_table(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(CSV)
    raw = checked("csv", tmp_path, path="x.csv", target="price", client="who")
    assert raw.train.inputs[0].shape == (24, 3)  # age, and two cities
    assert raw.train.inputs[0].dtype == np.float32
    assert raw.train.inputs[0][:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert raw.train.inputs[0][:, 0].std() == pytest.approx(1, rel=1e-5)
    assert (raw.num_outputs, raw.num_groups) == (1, 0)
    ages = raw.train.inputs[0][:, 0] * raw.facts["features"][0]["std"] + raw.facts["features"][0]["mean"]
    assert raw.train.targets[:, 0] == pytest.approx(1.5 * (ages - 20), abs=1e-4)
    assert raw.train.clients.tolist() == [round(float(age) - 20) % 3 for age in ages]
    assert len(raw.test) == 6


def test_whole_numbers_are_classes_or_amounts(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("age,rooms\n" + "".join(f"{n},{n % 4}\n" for n in range(20)))
    (tmp_path / "all.csv").write_text("age,price\n" + "".join(f"{n},{10 * n}\n" for n in range(20)))
    assert checked("csv", tmp_path, path="x.csv", target="rooms").num_outputs == 4
    assert checked("csv", tmp_path, path="all.csv", target="price", standardize_target=True).num_groups == 0
    amounts = tiny([f"data={{dataset: csv, path: {tmp_path}/all.csv, target: price, kind: regression, "
                    f"partition: {{type: iid, clients: 4}}}}",
                    "task=regression", "model={type: mlp, hidden: [4]}", "filter=none"])  # fmt: skip
    assert load_federation(amounts, prepares=True).dataset.train.targets.is_floating_point()
    with pytest.raises(ValueError, match=r"data\.kind: regression$"):
        checked("csv", tmp_path, path="all.csv", target="price")


def test_a_word_among_numbers_of_the_target_is_named(tmp_path: Path) -> None:
    lines = [f"{n},{1.5 * n}" for n in range(20)]
    (tmp_path / "x.csv").write_text("\n".join(["age,price", *lines, "7,NA"]))
    (tmp_path / "y.csv").write_text("\n".join(["age,price", *lines]))
    with pytest.raises(ValueError, match=r"x\.csv, line 22: price is 'NA'"):
        checked("csv", tmp_path, train="x.csv", test="y.csv", target="price")
    with pytest.raises(ValueError, match=r"x\.csv, line 22: price is 'NA'"):
        checked("csv", tmp_path, train="y.csv", test="x.csv", target="price")


@pytest.mark.parametrize("clients", [2, None])
def test_clients_keep_the_names_that_the_data_give_them(tmp_path: Path, clients: int | None) -> None:
    towns = ["Ulm", "Bonn", "Aachen"]
    lines = [f"{n},{1.5 * n},{towns[n % 3]}" for n in range(60)]
    (tmp_path / "x.csv").write_text("\n".join(["age,price,town", *lines]))
    number = "null" if clients is None else str(clients)
    config = tiny([f"data={{dataset: csv, path: {tmp_path}/x.csv, target: price, client: town}}", "task=regression",
                   f"data.partition={{type: natural, clients: {number}}}", "model={type: mlp, hidden: [4]}",
                   "filter=none", "clients_per_round=2"])  # fmt: skip
    found = load_federation(config, prepares=True)
    assert found.names is not None
    for name, samples in zip(found.names, found.clients, strict=True):
        for sample in samples:  # prices tell the line, and that the town
            price = float(found.dataset.train.targets[sample])
            assert towns[round(price / 1.5) % 3] == name


def test_of_two_tables_the_training_samples_alone_decide(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,kind,y\n1,p,no\n3,q,yes\n")
    with gzip.open(tmp_path / "b.csv.gz", "wt") as file:
        file.write("y,x,kind\nno,5,other\n")
    raw = checked("csv", tmp_path, train="a.csv", test="b.csv.gz", target="y")
    assert raw.train.inputs[0].tolist() == [[-1, 1, 0], [1, 0, 1]]
    assert raw.test.inputs[0].tolist() == [[3, 0, 0]]
    assert raw.train.targets.tolist() == [0, 1]
    assert raw.facts["targets"] == [{"classes": ["no", "yes"]}]
    assert raw.train.groups is raw.train.targets


def test_equal_numbers_have_no_deviation_and_1_and_1_0_are_one_class(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n0.1,1\n0.1,1.0\n0.1,0\n")  # the mean of these is not 0.1
    (tmp_path / "b.csv").write_text("x,y\n0.2,1.00\n")
    raw = checked("csv", tmp_path, train="a.csv", test="b.csv", target="y")
    assert raw.train.inputs[0].tolist() == [[0], [0], [0]]
    assert raw.test.inputs[0][0, 0] == pytest.approx(0.1)
    assert raw.train.targets.tolist() == [1, 1, 0]
    assert raw.facts["targets"] == [{"classes": ["0", "1"]}]


def test_texts_and_next_words(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TEXTS))
    raw = checked("text", tmp_path, path="x.jsonl", client="user", max_length=4)
    assert raw.train.inputs[0].shape == (19, 4)
    assert raw.facts["classes"] == ["no", "yes"]
    assert raw.facts["vocabulary"][:3] == [",", "film", "no"]  # as often as each other, in the alphabet's order
    following = checked("text", tmp_path, path="x.jsonl", target="next", max_length=9, tokenizer="hashing",
                        vocabulary_size=50)  # fmt: skip
    inputs, targets = following.train.inputs[0][0], following.train.targets[0]
    assert targets[:4].tolist() == inputs[1:5].tolist()
    assert targets[4] > 1, "what follows the last input"
    assert targets[5:].tolist() == [IGNORED] * 4
    assert following.num_outputs == following.vocabulary == 50


def test_only_training_texts_make_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nred red blue,0\ngreen,1\n")
    (tmp_path / "b.csv").write_text("text,label\nred yellow,1\n")
    raw = checked("text", tmp_path, train="a.csv", test="b.csv", max_length=3, min_count=1)
    assert raw.facts["vocabulary"] == ["red", "blue", "green"]
    assert raw.test.inputs[0].tolist() == [[2, 1, 0]]


def test_users_of_leaf_have_their_own_test_samples(tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist", lambda n: [n / 4] * 16, lambda n: n % 2 + 3)
    raw = checked("leaf", tmp_path, path="femnist", shape=[4, 4])
    assert raw.train.inputs[0].shape == (12, 4, 4, 1)
    assert raw.train.clients.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert raw.test.clients.tolist() == [2] * 4 + [0] * 4
    assert set(raw.train.targets) == {0, 1}
    write_leaf(tmp_path / "shakespeare", lambda n: "to be or not"[n:], lambda n: "abab"[n])
    words = checked("leaf", tmp_path, path="shakespeare", max_length=5)
    assert words.train.inputs[0].shape == (12, 5)
    config = tiny([f"data={{dataset: leaf, path: {tmp_path}/femnist, shape: [4, 4], root: {tmp_path}}}",
                   "data.partition={type: natural, clients: null}", "clients_per_round=2"])  # fmt: skip
    federation = load_federation(config, prepares=True)
    assert [len(own) for own in federation.tests] == [4, 0, 4]
    assert federation.names == ["ann", "bob", "eve"]


@pytest.mark.parametrize("shape", [[2, 4], [1, 2, 4], [2, 4, 1]])
def test_grey_images_of_leaf(tmp_path: Path, shape: list[int]) -> None:
    write_leaf(tmp_path / "femnist", lambda n: [*range(7), 7 + n], lambda n: n % 2)
    images = checked("leaf", tmp_path, path="femnist", shape=shape).train.inputs[0]
    assert images[0, :, :, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("shape", [[2, 3], [1, 8, 1], [2, 2, 2], [1, 2, 3]])
def test_shapes_that_no_image_of_leaf_has(tmp_path: Path, shape: list[int]) -> None:
    write_leaf(tmp_path / "femnist", lambda n: [float(n)] * 8, lambda n: n % 2)
    with pytest.raises(ValueError, match=r"^data\.shape: got"):
        checked("leaf", tmp_path, path="femnist", shape=shape)


@pytest.mark.parametrize(("shape", "red"), [([3, 2, 2], [0, 1, 2, 3]), ([2, 2, 3], [0, 3, 6, 9])])
def test_colours_of_leaf_may_be_first_or_last(tmp_path: Path, shape: list[int], red: list[int]) -> None:
    write_leaf(tmp_path / "celeba", lambda n: [*range(11), 11 + n], lambda n: n % 2)
    images = checked("leaf", tmp_path, path="celeba", shape=shape).train.inputs[0]
    assert images.shape == (12, 2, 2, 3)
    assert images[0, :, :, 0].ravel().tolist() == red


def test_images_in_folders(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", (8, 12), "jpg")
    with pytest.raises(ValueError, match=r"^data\.size: .*12x12 pixels but .*8x8; give the size"):
        source("folder", tmp_path, path="pets").load()
    raw = checked("folder", tmp_path, path="pets", size=[6, 5], channels=1)
    assert raw.train.inputs[0].shape == (12, 6, 5, 1)
    assert raw.train.targets.tolist() == [0] * 6 + [1] * 6
    assert raw.facts == {"classes": ["cat", "dog"]}
    split = checked("folder", tmp_path, path="pets/train", size=[6, 5])
    assert (len(split.train), len(split.test)) == (10, 2)
    (tmp_path / "again").symlink_to(tmp_path / "pets" / "train")
    same = (source("folder", tmp_path, path=path).fingerprint() for path in ("pets/train", "again"))
    assert len(set(same)) == 1, "what the folder is called does not count"
    dogs = tmp_path / "pets" / "train" / "dog"
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(dogs / "9.png")
    with pytest.raises(ValueError, match=r"dog/9\.png .* more than 8 bits a channel"):
        source("folder", tmp_path, path="pets", size=[6, 5]).load()
    (dogs / "9.png").unlink()
    (dogs / "9.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(ValueError, match=r"dog/9\.png is a link to nothing"):
        source("folder", tmp_path, path="pets", size=[6, 5]).load()
    (dogs / "9.png").unlink()
    (tmp_path / "pets" / "train" / "dog" / "3.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"^data\.path: .*train/dog/3\.jpg cannot be read as an image"):
        source("folder", tmp_path, path="pets", size=[6, 5]).load()


def test_any_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "inputs_0": rng.random((9, 3)),
        "inputs_1": rng.integers(5, size=(9, 2), dtype=np.int16),
        "targets": rng.random((9, 2)).astype(np.float16),
        "clients": np.array(list("bbaabbccc")),
    }
    np.savez(tmp_path / "x.npz", **{f"{s}_{name}": array for s in ("train", "test") for name, array in arrays.items()})
    raw = checked("npz", tmp_path, path="x.npz")
    assert [part.dtype for part in raw.train.inputs] == [np.float64, np.int64]
    assert raw.train.targets.dtype == np.float32
    assert raw.num_outputs == 2
    assert raw.test.clients.tolist() == [1, 1, 0, 0, 1, 1, 2, 2, 2]
    np.savez(tmp_path / "y.npz", train_inputs=np.ones((4, 2)), test_inputs=np.ones((2, 2)), train_targets=np.arange(4),
             test_targets=np.arange(2))  # fmt: skip
    classes = checked("npz", tmp_path, path="y.npz")
    assert (classes.num_outputs, classes.num_groups) == (4, 4)
    images, labels = rng.integers(255, size=(4, 6, 6), dtype=np.uint8), np.arange(4) % 2
    np.savez(tmp_path / "z.npz", train_images=images, test_images=images, train_labels=labels, test_labels=labels,
             train_clients=np.array(list("bbcc")), test_clients=np.array(list("aacc")))  # fmt: skip
    of_clients = checked("npz", tmp_path, path="z.npz")
    assert of_clients.train.clients.tolist() == [1, 1, 2, 2]
    assert of_clients.test.clients.tolist() == [0, 0, 2, 2]
    assert of_clients.pixels is not None


def write_mnist(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, count in zip(names, (20, 8), strict=True):
        images = rng.integers(255, size=(count, 28, 28), dtype=np.uint8)
        header = b"".join(n.to_bytes(4, "big") for n in (2051, count, 28, 28))
        (folder / f"{split}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8)
        header = b"".join(n.to_bytes(4, "big") for n in (2049, count))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def test_a_data_set_of_torchvision(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", "train", "t10k")
    raw = checked("torchvision", tmp_path, name="MNIST")
    assert raw.train.inputs[0].shape == (20, 28, 28, 1)
    assert raw.test.targets.tolist() == list(range(8))
    with pytest.raises(ValueError, match=r"^data\.name: SVHN of torchvision cannot be opened .* data\.download"):
        source("torchvision", tmp_path, name="SVHN").load()


def test_what_a_class_of_torchvision_hands_to_its_parent_is_known(tmp_path: Path) -> None:
    """EMNIST's `train` is an argument of MNIST's; its `split` is another thing than a part."""
    write_mnist(tmp_path / "EMNIST" / "raw", "emnist-digits-train", "emnist-digits-test")
    raw = checked("torchvision", tmp_path, name="EMNIST", arguments={"split": "digits"})
    assert (len(raw.train), len(raw.test)) == (20, 8)
    with pytest.raises(ValueError, match=r"^data\.arguments: EMNIST of torchvision needs an argument: .*split"):
        source("torchvision", tmp_path, name="EMNIST").load()


@pytest.mark.parametrize("place", [0, 3])
def test_each_image_of_torchvision_counts_in_the_fingerprint(place: int, tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", "train", "t10k")
    for n in range(10):
        for name in ("cat", "dog"):
            path = tmp_path / "eurosat" / "2750" / name / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((6, 6, 3), n, np.uint8)).save(path)
    for name, file in (("MNIST", "MNIST/raw/train-images-idx3-ubyte"), ("EuroSAT", f"eurosat/2750/dog/{place}.png")):
        before = source("torchvision", tmp_path, name=name).fingerprint()
        assert before == source("torchvision", tmp_path, name=name).fingerprint()
        if name == "EuroSAT":
            Image.fromarray(np.full((6, 6, 3), 99, np.uint8)).save(tmp_path / file)
        else:
            content = bytearray((tmp_path / file).read_bytes())
            content[16 + 784 * place + 300] ^= 255
            (tmp_path / file).write_bytes(content)
        assert before != source("torchvision", tmp_path, name=name).fingerprint()


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="the package datasets is not installed")
def test_a_data_set_of_hugging_face(tmp_path: Path) -> None:
    import datasets

    made = datasets.Dataset.from_list(TEXTS)
    datasets.DatasetDict({"train": made, "test": made.select(range(4))}).save_to_disk(str(tmp_path / "x"))
    raw = checked("huggingface", tmp_path, path="x", client="user", max_length=4)
    assert raw.train.inputs[0].shape == (24, 4)
    assert raw.test.clients.tolist() == [0, 1, 2, 3]
    images = [Image.fromarray(np.full((8, 8, 3), n, np.uint8)) for n in range(10)]
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 5}, features=kinds).save_to_disk(str(tmp_path / "y"))
    pets = checked("huggingface", tmp_path, path="y")
    assert pets.train.inputs[0].shape == (8, 8, 8, 3)
    assert pets.pixels is not None
    for name, features, label, message in (
        ("ragged", [[1.0, 2.0]] * 9 + [[1.0]], [0, 1] * 5, r"^data\.input: samples differ in size"),
        ("missing", [[1.0]] * 10, [0, None] * 5, r"^data\.path: .*label of train sample \d is missing"),
        ("no numbers", [{"a": 1}] * 10, [0, 1] * 5, r"^data\.input: a sample is of type dict"),
    ):
        datasets.Dataset.from_dict({"features": features, "label": label}).save_to_disk(str(tmp_path / name))
        with pytest.raises(ValueError, match=message):
            source("huggingface", tmp_path, path=name).load()


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the package datasets is installed")
def test_without_the_package_of_hugging_face_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(ValueError, match="pip install datasets"):
        source("huggingface", tmp_path, path="x").load()


HOSTILE: dict[str, tuple[str, dict[str, Any], dict[str, str | bytes], str]] = {
    "no file": ("csv", {"path": "x.csv", "target": "y"}, {}, r"^data\.path: no file x\.csv; looked at"),
    "a folder": ("csv", {"path": ".", "target": "y"}, {}, r"^data\.path: .* is a folder; give a file"),
    "nothing": ("csv", {"path": "x.csv", "target": "y"}, {"x.csv": ""}, "has 0 lines"),
    "a header only": ("csv", {"path": "x.csv", "target": "y"}, {"x.csv": "x,y\n"}, "has 1 lines"),
    "no such target": (
        "csv",
        {"path": "x.csv", "target": "z"},
        {"x.csv": "x,y\n1,2\n3,4\n5,6\n"},
        "no column 'z'; there are: x",
    ),
    "one sample": ("csv", {"path": "x.csv", "target": "y"}, {"x.csv": "x,y\n1,2\n"}, "test_fraction"),
    "an empty cell": (
        "csv",
        {"path": "x.csv", "target": "y"},
        {"x.csv": "x,y\n1,2\n,3\n4,5\n6,7\n8,9\n"},
        "line 3: column 'x' is empty",
    ),
    "a nan": ("csv", {"path": "x.csv", "target": "y"}, {"x.csv": "x,y\n" + "nan,2\n" * 9}, r"line \d+: x is 'nan'"),
    "a short line": ("csv", {"path": "x.csv", "target": "y"}, {"x.csv": "x,y\n1,2\n3\n"}, "line 3: 1 values, but"),
    "gibberish in gzip": (
        "csv",
        {"path": "x.csv.gz", "target": "y"},
        {"x.csv.gz": gzip.compress(bytes(range(256)) * 9)[:12] + b"\xff" * 40},
        r"cannot read .*x\.csv\.gz",
    ),
    "one word for what is missing": (
        "csv",
        {"path": "x.csv", "target": "y"},
        {"x.csv": "x,y\n" + "1.5,2.5\n" * 30 + "NA,2.5\n" * 8},
        r"line \d+: x is 'NA', but most of the column are numbers",
    ),
    "a column of names": (
        "csv",
        {"path": "x.csv", "target": "y"},
        {"x.csv": "x,y\n" + "".join(f"id{n},{n}.5\n" for n in range(1300))},
        "x has 1040 different words; allowed are 1000",
    ),
    "the target among the features": (
        "csv",
        {"path": "x.csv", "target": "y", "features": ["x", "y"]},
        {"x.csv": "x,y\n" + "1,2\n" * 9},
        r"^data\.features: 'y' is the target",
    ),
    "a feature twice": (
        "csv",
        {"path": "x.csv", "target": "y", "features": ["x", "x"]},
        {"x.csv": "x,y\n" + "1,2\n" * 9},
        r"^data\.features: .* each column once",
    ),
    "two of a name": ("csv", {"path": "x.csv", "target": "y"}, {"x.csv": "x,x,y\n1,2,3\n"}, "each needs a name of its"),
    "no utf-8": ("csv", {"path": "x.csv", "target": "y"}, {"x.csv": b"x,y\n\xff\xfe,2\n"}, "cannot read .* UTF-8"),
    "a word among numbers": (
        "csv",
        {"train": "a.csv", "test": "b.csv", "target": "y"},
        {"a.csv": "x,y\n1,2\n3,4\n", "b.csv": "x,y\nten,2\n"},
        "b.csv, line 2: x is 'ten'; the column has finite",
    ),
    "a class of the test alone": (
        "csv",
        {"train": "a.csv", "test": "b.csv", "target": "y"},
        {"a.csv": "x,y\n1,no\n3,yes\n", "b.csv": "x,y\n5,maybe\n"},
        "line 2: y is 'maybe', which no training sample",
    ),
    "path and train": ("csv", {"path": "x", "train": "y", "test": "z", "target": "y"}, {}, "give one file, or"),
    "no json": ("text", {"path": "x.jsonl"}, {"x.jsonl": "{\n"}, "cannot read .*x.jsonl"),
    "no such field": (
        "text",
        {"path": "x.jsonl"},
        {"x.jsonl": '{"body": "hi", "label": 1}\n'},
        "record 1: 'text' is None",
    ),
    "a list": ("text", {"path": "x.jsonl"}, {"x.jsonl": "[1]\n"}, "record 1: .*has: list"),
    "commas in a text": (
        "text",
        {"path": "x.csv"},
        {"x.csv": "text,label\na,b,1\n"},
        r"line 2: not as many values as there are columns \(2\)",
    ),
    "two columns of texts": ("text", {"path": "x.csv"}, {"x.csv": "text,text,label\na,b,1\n"}, "a name of its own"),
    "nested without an end": ("text", {"path": "x.jsonl"}, {"x.jsonl": "[" * 200_000}, r"cannot read .*x\.jsonl"),
    "labels of two kinds": (
        "text",
        {"path": "x.jsonl"},
        {"x.jsonl": '{"text": "a", "label": 1}\n{"text": "b", "label": "1"}\n' * 4},
        r"^data\.label: some are int and some str",
    ),
    "another ending": ("text", {"path": "x.txt"}, {"x.txt": "text,label\n"}, r"allowed are \.csv and \.jsonl"),
    "no known tokenizer": (
        "text",
        {"path": "x.csv", "tokenizer": "bpe"},
        {"x.csv": "text,label\na,1\nb,0\n" * 3},
        r"^data\.tokenizer: got 'bpe'; allowed: words, characters, hashing",
    ),
    "no texts": ("text", {"path": "x.csv"}, {"x.csv": "text,label\n"}, "has no records"),
    "no tokenizer": (
        "text",
        {"path": "x.csv", "tokenizer": "t.json"},
        {"x.csv": "text,label\na,1\nb,0\n" * 3},
        "tokenizer",
    ),
    "no users": ("leaf", {"path": "f"}, {"f/train/a.json": "{}", "f/test/a.json": "{}"}, "'users' is missing"),
    "no json in leaf": ("leaf", {"path": "f"}, {"f/train/a.json": "[", "f/test/a.json": "["}, "not as LEAF writes it"),
    "labels of two kinds in leaf": (
        "leaf",
        {"path": "f"},
        {
            f"f/{split}/a.json": '{"users": ["u"], "user_data": {"u": {"x": [[1], [2]], "y": [0, "b"]}}}'
            for split in ("train", "test")
        },
        r"^data\.path: labels are int and str",
    ),
    "no lists in leaf": (
        "leaf",
        {"path": "f"},
        {
            f"f/{split}/a.json": '{"users": ["u"], "user_data": {"u": {"x": "ab", "y": "cd"}}}'
            for split in ("train", "test")
        },
        "x or y of user u is no list",
    ),
    "nested in leaf": (
        "leaf",
        {"path": "f"},
        {f"f/{s}/a.json": "[" * 200_000 for s in ("train", "test")},
        "not as LEAF",
    ),
    "no images": ("folder", {"path": "f"}, {"f/cat/x.txt": "x"}, "has no images in folders"),
    "no classification": (
        "torchvision",
        {"name": "Kitti"},
        {},
        r"^data\.name: got 'Kitti'; allowed are classification",
    ),
    "no such argument": (
        "torchvision",
        {"name": "MNIST", "arguments": {"train": True}},
        {},
        r"^data\.arguments: got train; of MNIST allowed are: none",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_sound_is_told_in_a_sentence(case: str, tmp_path: Path) -> None:
    name, settings, files, message = HOSTILE[case]
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        source(name, tmp_path, **settings).load()
    assert str(caught.value).startswith("data")


ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "tests without inputs": ({"test_inputs": None}, "has train_inputs but no test_inputs"),
    "a name with a slip": ({"train_target": np.arange(4)}, "has train_target, which is not read"),
    "a gap": ({f"{s}_inputs": None for s in ("train", "test")} | {f"{s}_inputs_{n}": np.ones(4) for n in (0, 2)
              for s in ("train", "test")}, "train_inputs_2, test_inputs_2, which is not read"),
    "text": ({"train_inputs": np.array(list("abcd"))}, "train_inputs has type <U1"),
    "too large": ({"train_inputs": np.full(4, 2**63, np.uint64)}, r"allowed: below 2\^63"),
    "far too many classes": ({"train_targets": np.arange(4) * 10**9}, "number them 0 to 3 with data.renumber=true"),
    "clients in the test alone": ({"test_clients": np.arange(4)}, "has test_clients but no train_clients"),
    "clients that are no number": ({"train_clients": np.full(4, np.nan)}, "train_clients has shape .* type float64"),
    "clients of two kinds": ({"train_clients": np.arange(4), "test_clients": np.array(list("0123"))},
                             "allowed are integers in both, or strings in both"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_that_are_not_sound_are_told_in_a_sentence(case: str, tmp_path: Path) -> None:
    changes, message = ARRAYS[case]
    sound = {f"{s}_{name}": array for s in ("train", "test") for name, array in
             (("inputs", np.ones((4, 2))), ("targets", np.arange(4)))}  # fmt: skip
    np.savez(tmp_path / "x.npz", **sound)
    checked("npz", tmp_path, path="x.npz")
    np.savez(tmp_path / "y.npz", **{n: array for n, array in {**sound, **changes}.items() if array is not None})
    with pytest.raises(ValueError, match=rf"^data\.path: .*{message}"):
        source("npz", tmp_path, path="y.npz").load()


ROWS, NUMBERS = np.ones((4, 3), np.float32), np.arange(4)
UNSOUND: dict[str, tuple[dict[str, Any], str]] = {
    "a nan": (
        {"inputs": (np.full((4, 3), np.nan, np.float32),)},
        "inputs 0 at index 0 have a value that is not finite",
    ),
    "too few targets": ({"targets": NUMBERS[:3]}, r"of \[3, 4\] samples"),
    "text": ({"inputs": (np.array(list("abcd")),)}, "inputs 0 are of type <U1"),
    "a list": ({"inputs": ([1, 2],)}, "inputs 0 are of a list"),
    "a group too many": ({"groups": NUMBERS}, r"group at index 3 is 3; allowed is 0\.\.2"),
    "nothing": ({"inputs": (ROWS[:0],), "targets": NUMBERS[:0]}, "is empty"),
    "no inputs": ({"inputs": ()}, "has no inputs"),
    "another width in the test": (
        {"inputs": (ROWS[:, :2],)},
        r"\[2\] of float32 in train but \[3\] of float32 in test",
    ),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_raw_data_are_checked(case: str) -> None:
    changes, message = UNSOUND[case]
    sound = {"inputs": (ROWS,), "targets": NUMBERS}
    RawData(Split(**sound), Split(**sound), 4, 3).check("mine")
    with pytest.raises(ValueError, match=rf"^data\.dataset: mine: .*{message}"):
        RawData(Split(**{**sound, **changes}), Split(**sound), 4, 3).check("mine")


def test_arrays_of_float64_are_trained_on_in_the_precision_of_the_run(tmp_path: Path) -> None:
    sound = {"inputs": np.random.default_rng(0).random((30, 5)), "targets": np.arange(30) % 3}
    np.savez(tmp_path / "x.npz", **{f"{s}_{name}": array for s in ("train", "test") for name, array in sound.items()})
    for dtype in ("float32", "float64"):
        config = tiny([f"data={{dataset: npz, path: {tmp_path}/x.npz, root: {tmp_path}}}", f"runtime.dtype={dtype}",
                       "data.partition={type: iid, clients: 6}", "model={type: mlp, hidden: [4]}"])  # fmt: skip
        assert load_federation(config, prepares=True).dataset.train.inputs[0].dtype == getattr(torch, dtype)
        assert run_job(config, tmp_path / dtype).records[-1]["round"] == 2


def test_regression_on_a_table_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(CSV)
    config = tiny([f"data={{dataset: csv, path: {tmp_path}/x.csv, target: price, root: {tmp_path}}}", "task=regression",
                   "data.partition={type: iid, clients: 6}", "model={type: mlp, hidden: [4]}"])  # fmt: skip
    last = run_job(config, tmp_path / "run").records[-1]
    assert {"test_mse", "test_mae", "test_r2"} <= set(last)
    assert all(torch.tensor(last[name]).isfinite() for name in ("test_mse", "test_r2"))
