"""Reads chosen arrays of an .npz file, after what it announces of their sizes has been found possible."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_MAX_HEADER_BYTES = 10_000
# Deflate makes at most 1032 bytes of one. No images do that, at a size that matters.
_BOMB_BYTES, _BOMB_RATIO = 2**28, 500


class DamagedError(ValueError):
    """The file, or an array in it, is not what was once written."""


def names_in(path: Path) -> list[str]:
    """The names of the arrays.

    Raises:
        DamagedError: it is no .npz file. OSError: it cannot be read.
    """
    with _opened(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read_arrays(path: Path, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of these names; nothing is read before all their headers have been.

    Raises:
        DamagedError: an array is none, or announces another size than it has.
        ValueError: one holds objects, or they are larger than they should be. OSError: the file cannot be read.
    """
    with _opened(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        for key in keys:
            _check(key, members[key], *_announced(archive, key, members[key]))
        needed, there = sum(members[key].file_size for key in keys), _memory_bytes()
        if needed > there:
            raise ValueError(f"its arrays take {needed / 1e9:.1f} GB; this machine has {there / 1e9:.1f} GB of memory")
        return {key: _read(archive, key, members[key]) for key in keys}


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except OSError:
        raise
    except Exception as error:  # a foreign file makes zipfile raise nearly anything
        with open(path, "rb") as file:
            if file.read(6) == b"\x93NUMPY":
                raise DamagedError("it is a single array, not an .npz file") from error
        raise DamagedError(f"it is no .npz file ({error or type(error).__name__})") from error


def _announced(archive: zipfile.ZipFile, key: str, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype, int]:
    """What the array's header says: shape and type; and how many bytes follow it."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        with archive.open(info) as file:
            version = np.lib.format.read_magic(file)
            if version not in readers:
                raise ValueError(f"version {version} of the .npy format")
            shape, _, dtype = readers[version](file, max_header_size=_MAX_HEADER_BYTES)
            return shape, dtype, info.file_size - file.tell()
    except Exception as error:
        raise _damaged(key, error) from error


def _check(key: str, info: zipfile.ZipInfo, shape: tuple[int, ...], dtype: np.dtype, held: int) -> None:
    if dtype.hasobject:
        raise ValueError(
            f"{key} has dtype object, as columns of pandas have; such arrays may run code and are not read. Store "
            f"numbers or strings, for example {key}=column.to_numpy(dtype=str)"
        )
    expected = dtype.itemsize * math.prod(shape)
    if any(size < 0 for size in shape) or expected != held:
        size = "x".join(map(str, shape)) or "one"
        raise DamagedError(f"{key} announces {size} of {dtype}, {expected} bytes, but holds {held}")
    if info.file_size > _BOMB_BYTES and info.file_size > _BOMB_RATIO * info.compress_size:
        raise ValueError(
            f"{key} grows from {info.compress_size / 1e6:.1f} MB to {info.file_size / 1e6:.0f} MB when it is unpacked, "
            "which no images do; if it is what you want, store it with np.savez, not compressed"
        )


def _read(archive: zipfile.ZipFile, key: str, info: zipfile.ZipInfo) -> np.ndarray:
    try:
        with archive.open(info) as file:
            array = np.lib.format.read_array(file, allow_pickle=False, max_header_size=_MAX_HEADER_BYTES)
            file.read(1)  # the end of the member, where its checksum is compared
            return array
    except MemoryError as error:
        raise ValueError(f"{key} takes {info.file_size / 1e9:.1f} GB, and so much memory is not there") from error
    except Exception as error:  # of zipfile, zlib, lzma or numpy
        raise _damaged(key, error) from error


def _damaged(key: str, error: Exception) -> DamagedError:
    return DamagedError(f"{key} is damaged or no array ({str(error) or type(error).__name__})")


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
