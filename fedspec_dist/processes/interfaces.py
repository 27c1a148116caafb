"""The network interfaces of this host: which one leads to the other ranks, and what gloo and NCCL have to be told.

Both find their address through the host name. Where that resolves to loopback, to another address than the host has,
or not at all, ranks of other hosts are told to connect to themselves, and everybody waits.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedspec_dist.processes.environment import LaunchError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFCONF = 0x8912
_ENTRY = 40  # bytes of a struct ifreq on 64 bits
_IPV6_FILE = Path("/proc/net/if_inet6")
_LINK_LOCAL = "20"

Interfaces = Mapping[str, Sequence[str]]  # name -> its addresses, IPv4 first


def interfaces() -> dict[str, list[str]]:
    """Those of this host that have addresses; empty where the kernel is not Linux."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        buffer = array.array("B", bytes(256 * _ENTRY))
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))[0]
        for start in range(0, size, _ENTRY):
            entry = buffer[start : start + _ENTRY].tobytes()
            name = entry[:16].split(b"\0")[0].decode().split(":")[0]  # eth0:1 is a second address of eth0
            found.setdefault(name, []).append(socket.inet_ntoa(entry[20:24]))
    with contextlib.suppress(OSError):
        for line in _IPV6_FILE.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != _LINK_LOCAL:
                found.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def address_of(name: str, known: Interfaces) -> str:
    """The first address of the interface that `runtime.interface` names.

    Raises:
        LaunchError: this host has no such interface, or it has no address.
    """
    if name not in known:
        allowed = ", ".join(f"{other} ({', '.join(addresses)})" for other, addresses in known.items()) or "none found"
        raise LaunchError(
            f"runtime.interface: got {name!r}, but {socket.gethostname()} has no such interface with an address; "
            f"allowed there: {allowed}"
        )
    return known[name][0]


def candidates(known: Interfaces, of_name: Sequence[str]) -> list[str]:
    """Addresses at which others may find this host, the likeliest first.

    Those that the host name resolves to are what the administrator means; loopback ones lead others to themselves, but
    hosts may be namespaces that share one loopback interface.
    """
    own = [address for addresses in known.values() for address in addresses]
    ordered = [address for address in of_name if address in own or _is_loopback(address)] + own
    return sorted(dict.fromkeys(ordered), key=_is_loopback)


def resolve(host: str) -> list[str]:
    """Numeric addresses of a host name, none if it has none."""
    with contextlib.suppress(OSError, UnicodeError):
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None)))
    return []


def leads_here(of_name: Sequence[str], known: Interfaces) -> bool:
    """Whether an address of the host name can be told to others: this host has it, and it is not loopback."""
    own = {address for addresses in known.values() for address in addresses}
    return any(address in own and not _is_loopback(address) for address in of_name)


def is_here(address: str, known: Interfaces) -> bool:
    return _is_loopback(address) or any(address in addresses for addresses in known.values())


def towards(address: str, known: Interfaces) -> str | None:
    """The interface over which packets to a numeric address leave, or which has that address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            source = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for name, addresses in known.items() if source in addresses), None)


def socket_variables(interface: str, given: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment so that gloo and NCCL use an interface; what the user set stays.

    NCCL takes a bare name as the beginning of one.
    """
    wanted = {GLOO: interface, NCCL: f"={interface}"}
    return {name: value for name, value in wanted.items() if name not in given}


def set_socket_variables(interface: str) -> str:
    """Sets them for this process; what was set, for the log."""
    added = socket_variables(interface, os.environ)
    os.environ.update(added)
    return " ".join(f"{name}={value}" for name, value in added.items())


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback
