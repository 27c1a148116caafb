"""Checkpoints: whole directories, renamed into place, verified before they are believed.

    checkpoints/round-000010/
      model.safetensors     parameters and buffers under their module names
      server.safetensors    what the server's methods remember
      clients-00000.safetensors ...   what clients keep between participations, by client number; absent if nothing
      state.json            what the run needs besides: the round, what it was made with, how many files of clients
                            there are, and the size and SHA-256 of all files above

A directory without a `state.json` that matches its files is not a checkpoint, whatever its name.

Tensors that share memory, such as tied weights, are written once for each of their names: whoever loads a file finds
every name of the module's state in it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedspec_dist.core.failures import Kind
from fedspec_dist.runs.folder import checkpoints_in, round_of
from fedspec_dist.runs.identity import Identity
from fedspec_dist.runs.safe_files import create, open_regular, read_json, sha256, temporary_name

log = logging.getLogger(__name__)

_FORMAT = 3
_BEFORE_IDENTITIES = 2
MODEL, _SERVER = "model.safetensors", "server.safetensors"


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
    identity: Identity | None = None  # what it was made with; None in checkpoints that do not say
    first: int = 0  # rounds that came before the run's own, in those that it branched from
    first_phase: int = 0  # and phases


def save(folder: Path, state: SavedState, keep: int) -> Path:
    """Write `folder/round-NNNNNN` and then delete all but the newest `keep`.

    Raises:
        CheckpointError: the disk is full or cannot be written; older checkpoints stay.
    """
    target = folder / f"round-{state.round:06d}"
    temporary = temporary_name(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary.mkdir()
        _write(temporary, state)
        _remove(target)  # a damaged one of the same round, passed over at the start
        os.replace(temporary, target)
        _sync_directory(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of round {state.round} could not be written to {folder}: {error}. Earlier checkpoints are "
            "untouched: free space or choose another output=FOLDER, then start the same command again to resume"
        ) from error
    # Later rounds are damaged ones, passed over at the start; they count for nothing and are overwritten in time.
    for old in [path for path in checkpoints_in(folder) if round_of(path) <= state.round][keep:]:
        with contextlib.suppress(OSError):
            _remove(old)
    return target


def load_newest(folder: Path, fingerprint: str) -> SavedState | None:
    """The newest checkpoint that verifies, or None; says which ones it passed over and why."""
    for candidate in checkpoints_in(folder):
        try:
            return _load(candidate, fingerprint)
        except (OSError, ValueError, SafetensorError) as error:
            log.warning("checkpoint %s passed over: %s", candidate, error)
    return None


def load_checkpoint(folder: Path) -> SavedState:
    """A checkpoint of any config.

    Raises:
        ValueError, OSError, SafetensorError: it is none, or damaged.
    """
    return _load(folder, None)


def write_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, renamed into place; loadable with `safetensors.torch.load_file` and nothing else of ours."""
    temporary = temporary_name(path)
    try:
        _write_tensors(temporary, tensors)
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
        _write_tensors(folder / name, tensors)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    description = {
        "format": _FORMAT,
        "round": state.round,
        "first": state.first,
        "first_phase": state.first_phase,
        "config": state.fingerprint,
        "identity": (state.identity or Identity()).to_dict(),
        "client_files": len(files) - 2,
        "files": files,
    }
    path = folder / "state.json"
    path.write_text(json.dumps(description, indent=1))
    _sync(path)
    _sync_directory(folder)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A new safetensors file, readable by whom the umask says: the library itself makes it the owner's alone."""
    descriptor = create(path)
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    os.close(descriptor)
    copies = {name: _copy(tensor) for name, tensor in tensors.items()}
    save_file(copies, path)
    path.chmod(mode)
    _sync(path)


def _copy(tensor: Tensor) -> Tensor:
    """In memory of its own: the library refuses tensors that share some."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _files(state: SavedState) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    yield MODEL, state.model
    yield _SERVER, state.server
    for number, chunk in enumerate(state.clients):
        yield _clients_name(number), {str(client): tensor for client, tensor in chunk.items()}


def _clients_name(number: int) -> str:
    return f"clients-{number:05d}.safetensors"


def _load(folder: Path, fingerprint: str | None) -> SavedState:
    description = read_json(folder / "state.json")
    if not isinstance(description, dict):
        raise ValueError(f"state.json holds a {type(description).__name__}")
    if description.get("format") not in (_BEFORE_IDENTITIES, _FORMAT):
        raise ValueError(f"format {description.get('format')}, this version reads {_FORMAT}")
    if fingerprint is not None and description.get("config") != fingerprint:
        raise ValueError(f"belongs to config {description.get('config')}, not {fingerprint}")
    number = description.get("round")
    if type(number) is not int or number != round_of(folder):
        raise ValueError(f"is of round {number}")
    client_files = _verify(folder, description)
    model, server = (load_file(folder / name) for name in (MODEL, _SERVER))
    clients = (_client_states(folder / name) for name in client_files)
    identity, first = Identity.read(description.get("identity")), description.get("first", 0)
    if type(first) is not int or not 0 <= first <= number:
        raise ValueError(f"began after round {first}")
    phase = description.get("first_phase", 0)
    if type(phase) is not int or not 0 <= phase <= number:
        raise ValueError(f"began after phase {phase}")
    return SavedState(number, str(description.get("config")), model, server, clients, identity, first, phase)


def _verify(folder: Path, description: Mapping[str, Any]) -> list[str]:
    """Compare the files with what was written; the names of those of clients.

    All files that must be there have to be listed, and all sizes are compared before the first file is read.
    """
    listed = description.get("files")
    if not isinstance(listed, dict):
        raise ValueError("state.json lists no files")
    count = description.get("client_files")
    if description["format"] == _BEFORE_IDENTITIES:
        count = len(listed) - 2
    elif Identity.read(description.get("identity")) is None:
        raise ValueError("state.json does not say what it was made with")
    if type(count) is not int or count < 0:
        raise ValueError(f"state.json counts {count} files of clients")
    client_files = [_clients_name(number) for number in range(min(count, len(listed)))]
    if count + 2 != len(listed) or {MODEL, _SERVER, *client_files} != listed.keys():
        raise ValueError(f"state.json lists {', '.join(sorted(listed)) or 'no files'}, not all that must be there")
    for name, entry in listed.items():
        with open_regular(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
        if not isinstance(entry, dict) or entry.get("bytes") != size:
            written = entry.get("bytes") if isinstance(entry, dict) else "not known how many"
            raise ValueError(f"{name} is damaged ({size} bytes, {written} were written)")
    for name, entry in listed.items():
        if entry.get("sha256") != sha256(folder / name):
            raise ValueError(f"{name} is damaged: it has the right size, but not the content that was written")
    return client_files


def _client_states(path: Path) -> dict[int, Tensor]:
    return {int(client): tensor for client, tensor in load_file(path).items()}


def _remove_leftovers(folder: Path) -> None:
    """Half-written directories of killed processes. One process writes here, so none is in use."""
    for leftover in folder.glob(".round-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _remove(path: Path) -> None:
    """Whatever has the name of a checkpoint: a folder, a file, a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
