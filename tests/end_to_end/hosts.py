"""Two hosts on one machine: network namespaces with two networks between them, each with a host name of its own.

Needs root on Linux, or says why it cannot be had. Ending the two processes that hold the namespaces ends all of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

NETWORKS = ("slow", "fast")
_LIMIT_S = 10


class NoHostsError(RuntimeError):
    """This machine has no namespaces for us."""


def address(host: int, network: str) -> str:
    return f"10.77.{NETWORKS.index(network)}.{host + 1}"


class Hosts:
    """`node1` and `node2`; `command` puts a command onto one of them."""

    def __init__(self, holders: Sequence[subprocess.Popen[str]], folder: Path) -> None:
        self._holders = holders
        self._folder = folder

    def command(self, host: int, *command: str) -> list[str]:
        enter = ["nsenter", "-t", str(self._holders[host].pid), "--net", "--uts", "--mount", "--"]
        # Entering a mount namespace leads to its root folder.
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(self._folder), *command]

    def bytes_sent(self, host: int, network: str) -> int:
        """By all processes of a host, over one network, so far."""
        lines = subprocess.run(self.command(host, "cat", "/proc/net/dev"), capture_output=True, text=True).stdout
        (line,) = [line for line in lines.splitlines() if line.strip().startswith(f"{network}:")]
        return int(line.split(":")[1].split()[8])


@contextlib.contextmanager
def two_hosts(folder: Path, name_to: str = "") -> Iterator[Hosts]:
    """Every host's name resolves to an address: on network `name_to`, to loopback (`loopback`), or to none.

    Raises:
        NoHostsError: not root, or the kernel or the tools for it are missing.
    """
    if os.geteuid() != 0:
        raise NoHostsError("network namespaces need root")
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        raise NoHostsError(f"{', '.join(missing)} not installed")
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(_holder(host, folder, name_to)) for host in range(2)]
        hosts = Hosts(holders, folder)
        for network in NETWORKS:
            first, second = ([network, "netns", str(holder.pid)] for holder in holders)
            _run("ip", "link", "add", *first, "type", "veth", "peer", "name", *second)
        for host in range(2):
            _run(*hosts.command(host, "ip", "link", "set", "lo", "up"))
            for network in NETWORKS:
                _run(*hosts.command(host, "ip", "address", "add", f"{address(host, network)}/24", "dev", network))
                _run(*hosts.command(host, "ip", "link", "set", network, "up"))
        yield hosts


@contextlib.contextmanager
def _holder(host: int, folder: Path, name_to: str) -> Iterator[subprocess.Popen[str]]:
    names = folder / f"hosts-{host}"
    own = f"127.0.1.1 node{host + 1}\n" if name_to == "loopback" else ""
    own += "".join(f"{address(h, name_to)} node{h + 1}\n" for h in range(2) if name_to in NETWORKS)
    names.write_text(f"127.0.0.1 localhost\n{own}")
    script = (
        'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind /dev/null /etc/resolv.conf && echo up && cat'
    )
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "--", "sh", "-c", script, "holder", f"node{host + 1}", str(names)],
        stdin=subprocess.PIPE,  # ends with this process, however that ends
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        if (said := holder.stdout.readline().strip()) != "up":
            raise NoHostsError(f"unshare: {said}")
        yield holder
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if result.returncode:
        raise NoHostsError(f"{' '.join(command)}: {result.stderr.strip() or result.stdout.strip()}")
