"""A data set as named arrays: from what a source loads, and to the tensors that training reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from fedspec_dist.data.dataset import Dataset, Examples
from fedspec_dist.data.images.arrays import Arrays
from fedspec_dist.data.raw import RawData

PARTS = ("train_inputs_0", "test_inputs_0")  # of all data sets


class Source(Protocol):
    """Where a data set comes from."""

    @property
    def embedded(self) -> bool:
        """Whether every process makes it in memory, faster than reading a file."""

    @property
    def download(self) -> bool:
        """Whether `load` may get missing files from the internet."""

    def fingerprint(self) -> str:
        """Names the content: changes when the arrays do, and with nothing else that may differ between hosts, such as
        where files lie. Raises DatasetNotFoundError while the files are not there."""

    def load(self) -> RawData | Arrays: ...


def loaded(name: str, source: Source) -> RawData:
    try:
        given = source.load()
    except (OSError, NotImplementedError) as error:  # of a user's own; ours say it themselves
        raise ValueError(f"data.dataset: {name} cannot be loaded: {error}") from error
    if not isinstance(given, (Arrays, RawData)):
        raise ValueError(
            f"data.dataset: load() of {name} gave a {type(given).__name__}; allowed is an "
            "fedspec_dist.data.images.arrays.Arrays, which Arrays.of makes of images and labels, or an "
            "fedspec_dist.data.raw.RawData, of any arrays"
        )
    given.check(name)
    return given.raw() if isinstance(given, Arrays) else given


def in_memory(name: str, source: Source) -> Dataset:
    raw = loaded(name, source)
    parts = dict(parts_of(raw))
    if raw.pixels is not None:
        parts |= {part: normalised(parts[part], *raw.pixels) for part in PARTS}
    return as_dataset(parts, facts_of(raw))


def parts_of(raw: RawData) -> Iterator[tuple[str, np.ndarray]]:
    """Name of a file -> what is in it, not yet normalised. Groups that are the targets are there once."""
    for name, split in (("train", raw.train), ("test", raw.test)):
        for number, array in enumerate(split.inputs):
            yield f"{name}_inputs_{number}", array
        groups = None if split.groups is split.targets else split.groups
        for part, values in (("targets", split.targets), ("groups", groups), ("clients", split.clients)):
            if values is not None:
                yield f"{name}_{part}", values


def facts_of(raw: RawData) -> dict[str, Any]:
    """What is known of the data besides the arrays, as JSON has it."""
    pixels = {} if raw.pixels is None else {"mean": list(raw.pixels[0]), "std": list(raw.pixels[1])}
    return {
        "facts": {**pixels, **(raw.facts or {})},
        "num_outputs": raw.num_outputs,
        "num_groups": raw.num_groups,
        "vocabulary": raw.vocabulary,
        "are_images": raw.pixels is not None,
        "groups_are_targets": raw.train.groups is not None and raw.train.groups is raw.train.targets,
    }


def as_dataset(parts: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> Dataset:
    # Kernels may treat their first elements apart by alignment: torch's memory starts on a cache line, like the mapped
    # files, numpy's need not.
    tensors = {part: torch.from_numpy(np.ascontiguousarray(array)) for part, array in parts.items()}
    tensors = {part: tensor if tensor.data_ptr() % 64 == 0 else tensor.clone() for part, tensor in tensors.items()}

    def examples(split: str) -> Examples:
        names = sorted((part for part in tensors if part.startswith(f"{split}_inputs_")), key=_number)
        inputs = tuple(tensors[name] for name in names)
        if facts["are_images"]:  # n, H, W, C in memory, seen as n, C, H, W
            inputs = tuple(tensor.permute(0, 3, 1, 2) for tensor in inputs)
        targets = tensors.get(f"{split}_targets")
        groups = targets if facts["groups_are_targets"] else tensors.get(f"{split}_groups")
        return Examples(inputs, targets, groups, tensors.get(f"{split}_clients"))

    known = {name: facts[name] for name in ("num_outputs", "num_groups", "vocabulary", "are_images", "facts")}
    return Dataset(examples("train"), examples("test"), **known)


def _number(part: str) -> int:
    return int(part.rpartition("_")[2])


def normalised(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """`(x - mean) / std` per channel in float32, `x` being `images / 255` for uint8 ones. May not copy."""
    if images.dtype == np.float32 and not any(mean) and all(value == 1 for value in std):
        return images
    result = images.astype(np.float32)
    if images.dtype == np.uint8:
        result /= np.float32(255)
    result -= np.array(mean, np.float32)
    result /= np.array(std, np.float32)
    return result
