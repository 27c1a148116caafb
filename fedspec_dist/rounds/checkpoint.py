"""Checkpoints: whole directories, renamed into place, verified before they are believed.

    checkpoints/round-000010/
      model.safetensors     parameters and buffers under their module names
      server.safetensors    what the server's methods remember
      clients-00000.safetensors ...   what clients keep between participations, by client number; absent if nothing
      state.json            what the run needs besides, and the size and SHA-256 of the files above

A directory without a `state.json` that matches its files is not a checkpoint, whatever its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedspec_dist.failures import Kind

log = logging.getLogger(__name__)

_FORMAT = 2
_MODEL, _SERVER = "model.safetensors", "server.safetensors"
_NAME = re.compile(r"round-\d{6,}")


class CheckpointError(OSError):
    """A checkpoint could not be written; what was there before is untouched."""

    kind = Kind.FILES


@dataclass(frozen=True)
class SavedState:
    """A run after `round` completed rounds."""

    round: int
    fingerprint: str  # of the config
    model: Mapping[str, Tensor]
    server: Mapping[str, Tensor]
    # Client -> [S, P], some clients at a time: they need not all be in memory together. Can be gone through once.
    clients: Iterable[Mapping[int, Tensor]] = ()


def save(folder: Path, state: SavedState, keep: int) -> Path:
    """Write `folder/round-NNNNNN` and then delete all but the newest `keep`.

    Raises:
        CheckpointError: the disk is full or cannot be written; older checkpoints stay.
    """
    target = folder / f"round-{state.round:06d}"
    temporary = folder / f".{target.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary.mkdir()
        _write(temporary, state)
        if target.exists():  # a damaged one of the same round, passed over at the start
            shutil.rmtree(target)
        os.replace(temporary, target)
        _sync_directory(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of round {state.round} could not be written to {folder}: {error}. Earlier checkpoints are "
            "untouched: free space or choose another output=FOLDER, then start the same command again to resume"
        ) from error
    # Later rounds are damaged ones, passed over at the start; they count for nothing and are overwritten in time.
    for old in [path for path in _existing(folder) if _round(path) <= state.round][keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_newest(folder: Path, fingerprint: str) -> SavedState | None:
    """The newest checkpoint that verifies, or None; says which ones it passed over and why."""
    for candidate in _existing(folder):
        try:
            return _load(candidate, fingerprint)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            log.warning("checkpoint %s passed over: %s", candidate, error)
    return None


def write_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, renamed into place; loadable with `safetensors.torch.load_file` and nothing else of ours."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
        _sync(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} could not be written: {error}. The checkpoints are untouched: free space, then start the same "
            "command again"
        ) from error


def _write(folder: Path, state: SavedState) -> None:
    files = {}
    for name, tensors in _files(state):
        save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}, folder / name)
        _sync(folder / name)
        files[name] = _digest(folder / name)
    description = {"format": _FORMAT, "round": state.round, "config": state.fingerprint, "files": files}
    path = folder / "state.json"
    path.write_text(json.dumps(description, indent=1))
    _sync(path)
    _sync_directory(folder)


def _files(state: SavedState) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    yield _MODEL, state.model
    yield _SERVER, state.server
    for number, chunk in enumerate(state.clients):
        yield f"clients-{number:05d}.safetensors", {str(client): tensor for client, tensor in chunk.items()}


def _load(folder: Path, fingerprint: str) -> SavedState:
    description = json.loads((folder / "state.json").read_text())
    if description["format"] != _FORMAT:
        raise ValueError(f"format {description['format']}, this version reads {_FORMAT}")
    if description["config"] != fingerprint:
        raise ValueError(f"belongs to config {description['config']}, not {fingerprint}")
    if f"round-{description['round']:06d}" != folder.name:
        raise ValueError(f"is of round {description['round']}")
    files = dict(description["files"])
    for name, expected in files.items():
        found = _digest(folder / name)
        if expected != found:
            raise ValueError(f"{name} is damaged ({found['bytes']} bytes, {expected['bytes']} were written)")
    model, server = (load_file(folder / name) for name in (_MODEL, _SERVER))
    clients = (_client_states(folder / name) for name in sorted(set(files) - {_MODEL, _SERVER}))
    return SavedState(description["round"], fingerprint, model, server, clients)


def _client_states(path: Path) -> dict[int, Tensor]:
    return {int(client): tensor for client, tensor in load_file(path).items()}


def _existing(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted((path for path in folder.glob("round-*") if _NAME.fullmatch(path.name)), key=_round, reverse=True)


def _round(path: Path) -> int:
    return int(path.name.removeprefix("round-"))


def _remove_leftovers(folder: Path) -> None:
    """Half-written directories of killed processes. One process writes here, so none is in use."""
    for leftover in folder.glob(".round-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _digest(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: object) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):  # type: ignore[attr-defined]
        digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Some file systems notice only here that the disk is full."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync a directory
        _sync(path)
