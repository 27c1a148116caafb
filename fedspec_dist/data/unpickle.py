"""Reads pickles of plain containers and numpy arrays of bytes, and nothing else.

A pickle may call any function it can name. Here the few names that arrays are pickled with lead to the
stand-ins below, so no code from outside this file ever runs, and files of every numpy version (whose internal
names changed) read alike.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np


def load_plain_pickle(path: Path) -> Any:
    """The object in the file; Python 2 strings are read as latin1.

    Raises:
        ValueError: it needs any other function or class, or is truncated or no pickle.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            return _replace_arrays(_Unpickler(file, encoding="latin1").load())
        except OSError:
            raise
        except pickle.UnpicklingError as error:
            raise ValueError(f"it is not a plain pickle: {error}") from error
        except Exception as error:  # a foreign file makes the unpickler raise nearly anything
            raise ValueError(f"it is truncated or no pickle ({type(error).__name__}: {error})") from error


class _Dtype:
    """Stands for `numpy.dtype`; only bytes are needed, which have no byte order or fields in their state."""

    def __init__(self, code: str, *_: Any) -> None:
        if code not in ("u1", "|u1"):
            raise pickle.UnpicklingError(f"arrays of type {code!r} are not allowed, only 'u1'")

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for an array under construction."""

    def __init__(self, *_: Any) -> None:
        self.values: np.ndarray = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes | str]) -> None:
        _, shape, _, fortran_order, content = state
        # Python 2 pickled the content as a string.
        raw = content.encode("latin1") if isinstance(content, str) else content
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran_order else "C")


def _array_from_buffer(content: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Stands for `_codecs.encode`, by which old protocols write bytes."""
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _array_from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _array_from_buffer,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks to run {module}.{name}, which a data file has no business doing")
        return _STAND_INS[module, name]


def _replace_arrays(value: Any) -> Any:
    """The object with every array stand-in at the top or in the top dictionary replaced by its values."""
    if isinstance(value, dict):
        return {key: item.values if isinstance(item, _Array) else item for key, item in value.items()}
    return value.values if isinstance(value, _Array) else value
