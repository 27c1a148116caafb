"""Where the ranks of a job meet when no launcher gives them an address: rank 0 leaves it in the run folder.

Each start of a job has a file of its own, and a port that is bound before anybody is told of it. The store behind the
port knows a token that is in the file: neither a file left by an earlier start nor another job's store behind a port
that it had can be taken for this one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fedspec_dist.processes.environment import Environment, LaunchError

log = logging.getLogger(__name__)

_LOWEST_PORT, _HIGHEST_PORT = 20000, 65535
_PORTS_TRIED = 100
_POLL_S = 0.1
_REACH_S = 3.0  # for one address to answer
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOOPBACK = "127.0.0.1"


def meeting_file(folder: Path, attempt: str) -> Path:
    return folder / ".meeting" / attempt


def meet(
    folder: Path, environment: Environment, timeout_s: float, addresses: Sequence[str], bind: str = ""
) -> tuple[Any, str]:
    """The store of this start of the job, and the address at which this rank reached it.

    Args:
        folder: that all ranks see.
        environment: whose `attempt` names the file.
        timeout_s: for rank 0's file to appear.
        addresses: of this host, the best first; only rank 0's count.
        bind: the only address that rank 0 listens on; empty for all.

    Raises:
        LaunchError: rank 0 cannot write the file, or its file did not come in time.
    """
    file = meeting_file(folder, environment.attempt)
    if environment.rank == 0:
        return _host(file, environment, timeout_s, addresses, bind)
    return _join(file, environment, timeout_s)


def clear(folder: Path, attempt: str) -> None:
    """Remove the file, once all ranks have met."""
    file = meeting_file(folder, attempt)
    with contextlib.suppress(OSError):
        file.unlink()
        file.parent.rmdir()  # fails while other starts' files are there
        folder.rmdir()  # and this one where there is a run


def _host(
    file: Path, environment: Environment, timeout_s: float, addresses: Sequence[str], bind: str
) -> tuple[Any, str]:
    listener = listen(bind)
    port = listener.getsockname()[1]
    own = bind or LOOPBACK
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        own, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    token = uuid.uuid4().hex
    store.set("token", token)
    text = json.dumps({"addresses": [*addresses], "port": port, "token": token, "host": environment.host})
    temporary = file.with_name(f".{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, file)
    except OSError as error:
        raise LaunchError(
            f"output: rank 0 on {environment.host} cannot write {file}, where the other ranks look for it: "
            f"{error.strerror}; choose another output=FOLDER, on a file system that all hosts of the job share"
        ) from error
    log.debug("rank 0 listens at port %d of %s", port, ", ".join(addresses))
    return store, own


def _join(file: Path, environment: Environment, timeout_s: float) -> tuple[Any, str]:
    deadline = time.monotonic() + timeout_s
    found: dict[str, Any] = {}
    while time.monotonic() < deadline:
        found = _read(file) or found
        for address in found.get("addresses", ()):
            if (store := _reach(address, found["port"], found["token"])) is not None:
                store.set_timeout(timedelta(seconds=timeout_s))
                return store, address
        time.sleep(_POLL_S)
    who = f"rank {environment.rank} on {environment.host}"
    if not found:
        raise LaunchError(
            f"{who} waited {timeout_s:.0f} s (runtime.timeout_s) for rank 0 to say in {file} where to meet. Rank 0 did "
            "not start, or output= is not on a file system that all hosts of the job share"
        )
    raise LaunchError(
        f"{who} cannot reach rank 0 on {found['host']} at {', '.join(found['addresses'])}, port {found['port']}. "
        "Rank 0 has ended, or no network leads there: name the interface between the hosts with runtime.interface=NAME"
    )


def _read(file: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        os.listdir(file.parent)  # NFS remembers for up to a minute that a file is not there, unless its folder is read
        found = json.loads(file.read_text())
        return found if isinstance(found, dict) else None
    return None


def _reach(address: str, port: int, token: str) -> Any:
    """The store at an address if it is the one that has the token."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        # Refused or not in a moment; a store's client would go on trying for its whole time limit.
        socket.create_connection((address, port), timeout=_REACH_S).close()
        timeout = timedelta(seconds=_REACH_S)
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        if store.get("token").decode() == token:
            return store
    return None


def listen(bind: str) -> socket.socket:
    """A listening socket at a port that the kernel gives to nobody else, where there are such; else at any.

    Ports of the ephemeral range are those of outgoing connections: one is free now and taken in a moment, or by
    another rank of this very job.
    """
    for port in random.SystemRandom().sample(ports := _ports_outside(_ephemeral()), min(_PORTS_TRIED, len(ports))):
        with contextlib.suppress(OSError):
            return _bound(bind, port)
    return _bound(bind, 0)


def _bound(bind: str, port: int) -> socket.socket:
    if bind:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        return socket.create_server((bind, port), family=family)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be compiled in and switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _ephemeral() -> tuple[int, int]:
    """The first and the last port that the kernel gives to outgoing connections."""
    try:
        first, last = map(int, _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        return 32768, 60999
    return first, last


def is_ephemeral(port: int) -> bool:
    first, last = _ephemeral()
    return first <= port <= last


def _ports_outside(ephemeral: tuple[int, int]) -> Sequence[int]:
    first, last = ephemeral
    return [*range(_LOWEST_PORT, min(first, _HIGHEST_PORT + 1)), *range(max(last + 1, _LOWEST_PORT), _HIGHEST_PORT + 1)]
