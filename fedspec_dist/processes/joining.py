"""How the ranks of a job come together: at the launcher's store or at rank 0's, over a network that leads there."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fedspec_dist.processes import interfaces
from fedspec_dist.processes.environment import Environment, LaunchError
from fedspec_dist.processes.meeting import LOOPBACK, clear, meet
from fedspec_dist.processes.rendezvous import Introduction, introduce, part_of, this_start

log = logging.getLogger(__name__)

_POLL_S = 0.2
_TRY_S = 10.0  # for an address that does not answer


def come_together(
    environment: Environment,
    timeout_s: float,
    interface: str | None,
    folder: Path | None,
    gpu: tuple[str, str] = ("", ""),
) -> tuple[Any, str]:
    """The store that all ranks have joined, and the name of this start of the job in it.

    `gpu` is the unique name of this rank's GPU and its place on the bus; empty where ranks may share one.
    Sets the variables that tell gloo and NCCL their interface, where `interface` names one or the host name misleads.

    Raises:
        LaunchError: some rank did not come in time, or `interface` is none of this host's.
    """
    deadline = time.monotonic() + timeout_s  # one for all that has to happen
    known = interfaces.interfaces()
    here = interfaces.resolve(environment.host)
    if interface is not None:
        interfaces.address_of(interface, known)
    store, address = _reach_store(environment, deadline, interface, folder, known, here)
    store.set_timeout(timedelta(seconds=timeout_s))  # what is waited for from here on is there already
    try:
        start = this_start(store, environment, deadline)
        reached = "" if interfaces.is_here(address, known) else address
        mine = Introduction(environment.host, reached, interfaces.leads_here(here, known), *gpu)
        everybody = introduce(part_of(store, start), environment.rank, environment.num_ranks, mine)
    except RuntimeError as error:
        raise _not_together(environment, error) from error
    if environment.rank == 0 and environment.attempt and folder is not None:
        clear(folder, environment.attempt)
    _choose_interface(environment.rank, everybody, interface, known)
    _refuse_shared_gpus(everybody)
    return store, start


def _reach_store(
    environment: Environment,
    deadline: float,
    interface: str | None,
    folder: Path | None,
    known: interfaces.Interfaces,
    here: Sequence[str],
) -> tuple[Any, str]:
    """The launcher's store, or where it gives none the one of rank 0; and its address."""
    if environment.attempt and folder is not None:
        bind = ""
        addresses = interfaces.candidates(known, here)
        if interface is not None:
            bind = interfaces.address_of(interface, known)
        elif environment.local_num_ranks == environment.num_ranks:
            bind = LOOPBACK  # nobody else has to reach this host
        return meet(folder, environment, _left_s(deadline), [bind] if bind else addresses, bind)
    try:
        _wait_for_server(environment, deadline)
        timeout = timedelta(seconds=_left_s(deadline))
        store = next(dist.rendezvous("env://", environment.rank, environment.num_ranks, timeout=timeout))[0]
    except (RuntimeError, ValueError) as error:
        if time.monotonic() > deadline - 0.1 and "runtime.timeout_s" not in str(error):  # torch's word for it
            error = RuntimeError(f"{error} It is runtime.timeout_s that is over")
        raise _not_together(environment, error) from error
    return store, next(iter(interfaces.resolve(os.environ["MASTER_ADDR"])), LOOPBACK)


def _wait_for_server(environment: Environment, deadline: float) -> None:
    """Until somebody listens where the store is to be. Its client would take twice the time to find out that nobody
    does, and tell of each try with twenty lines.
    """
    if environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # the server itself
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    began = time.monotonic()
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, int(port)), timeout=max(min(left, _TRY_S), 0.1)).close()
            return
        except OSError as error:
            if left <= 0:
                waited = time.monotonic() - began
                raise RuntimeError(
                    f"nobody listens there after {waited:.0f} s (runtime.timeout_s): {error.strerror or error}"
                ) from error
        time.sleep(_POLL_S)


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1.0)


def _not_together(environment: Environment, error: Exception) -> LaunchError:
    advice = "Their own output may say what kept them"
    if not environment.attempt:
        advice = (
            f"They were to meet at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}. If the port is in "
            "use, start torchrun with --standalone (one host) or another --rdzv-endpoint"
        )
    others = environment.num_ranks - 1
    return LaunchError(
        f"rank {environment.rank} on {environment.host} could not join the other {others} ranks ({error}). {advice}"
    )


def _choose_interface(
    rank: int, everybody: Sequence[Introduction], interface: str | None, known: interfaces.Interfaces
) -> None:
    """The one that was named; else, where a host name misleads, the one between the hosts."""
    across = next((one.reached for one in everybody if one.reached), None)
    misleading = sorted({one.host for one in everybody if not one.known})
    why = "runtime.interface"
    if interface is None:
        if across is None or everybody[rank].known:
            return
        why = f"the host name leads to no address that other hosts can reach, on {', '.join(misleading)}"
        interface = interfaces.towards(across, known)
    if interface is None:
        log.warning("%s, and no interface leads to %s: name one with runtime.interface=NAME", why, across)
    elif added := interfaces.set_socket_variables(interface):
        log.info("set here: %s (%s)", added, why)


def _refuse_shared_gpus(everybody: Sequence[Introduction]) -> None:
    """NCCL would say `Duplicate GPU detected`, after a minute and without saying what to do.

    It compares places on the bus, so that it takes slices (MIG) of one GPU for the same, which have names of their own.
    """
    named: dict[Any, list[int]] = {}
    placed: dict[Any, list[int]] = {}
    for rank, one in enumerate(everybody):
        if one.gpu:
            named.setdefault(one.gpu, []).append(rank)
        if one.bus:
            placed.setdefault((one.host, one.bus), []).append(rank)
    for groups, have in ((named, "the same GPU"), (placed, "slices (MIG) of the same GPU")):
        for sharing in groups.values():
            if len(sharing) > 1:
                first = everybody[sharing[0]]
                raise LaunchError(
                    f"ranks {', '.join(map(str, sharing))} on {first.host} have {have} ({first.gpu or first.bus}), and "
                    "NCCL cannot share a GPU between ranks. Ask for one whole GPU a rank, or let ranks share GPUs over "
                    "gloo: runtime.backend=gloo",
                    everywhere=True,
                )
