"""Which of a host's addresses is told to others, and which interface leads to them."""

from __future__ import annotations

import os
import socket

import pytest

from fedspec_dist.processes import interfaces
from fedspec_dist.processes.environment import LaunchError
from fedspec_dist.processes.interfaces import (
    address_of,
    candidates,
    is_here,
    leads_here,
    resolve,
    set_socket_variables,
    socket_variables,
    towards,
)

HOST = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5", "fd00::5"], "ib0": ["10.9.0.5"], "docker0": ["172.17.0.1"]}


def test_this_hosts_interfaces() -> None:
    known = interfaces.interfaces()
    assert "127.0.0.1" in known["lo"]
    for addresses in known.values():
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family) as one:
                one.bind((address, 0))  # its own, or this fails
    assert towards("127.0.0.1", known) == towards("127.0.7.7", known) == "lo"


@pytest.mark.parametrize(
    ("of_name", "expected"),
    [
        (["10.9.0.5"], ["10.9.0.5", "10.0.0.5", "fd00::5", "172.17.0.1", "127.0.0.1", "::1"]),
        (["127.0.1.1"], ["10.0.0.5", "fd00::5", "10.9.0.5", "172.17.0.1", "127.0.1.1", "127.0.0.1", "::1"]),
        (["192.0.2.1"], ["10.0.0.5", "fd00::5", "10.9.0.5", "172.17.0.1", "127.0.0.1", "::1"]),  # not ours
        ([], ["10.0.0.5", "fd00::5", "10.9.0.5", "172.17.0.1", "127.0.0.1", "::1"]),
    ],
)
def test_others_are_told_the_names_address_first_and_loopback_last(of_name: list[str], expected: list[str]) -> None:
    assert candidates(HOST, of_name) == expected


@pytest.mark.parametrize(
    ("of_name", "leads"),
    [
        (["10.0.0.5"], True),
        (["127.0.1.1", "fd00::5"], True),
        (["127.0.1.1"], False),
        (["192.0.2.1"], False),
        ([], False),
    ],
)
def test_a_host_name_leads_here_by_an_address_that_is_ours_and_not_loopback(of_name: list[str], leads: bool) -> None:
    assert leads_here(of_name, HOST) == leads


def test_addresses_of_this_host() -> None:
    assert [is_here(address, HOST) for address in ("10.9.0.5", "127.0.0.9", "::1", "10.9.0.6")] == [
        True,
        True,
        True,
        False,
    ]


def test_names_without_an_address() -> None:
    assert resolve("localhost")[0] in ("127.0.0.1", "::1")
    assert resolve("no.such.host.invalid") == resolve("") == resolve("x" * 300) == []


def test_an_interface_by_name() -> None:
    assert address_of("ib0", HOST) == "10.9.0.5"
    message = (
        r"runtime\.interface: got 'ib1', but .* has no such interface .*allowed there: lo \(127\.0\.0\.1, ::1\), eth0"
    )
    with pytest.raises(LaunchError, match=message):
        address_of("ib1", HOST)
    with pytest.raises(LaunchError, match="allowed there: none found"):
        address_of("ib1", {})


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_variables("eth0", {}) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert socket_variables("eth0", {"NCCL_SOCKET_IFNAME": "^lo"}) == {"GLOO_SOCKET_IFNAME": "eth0"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "x")  # so that it is taken back afterwards
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert set_socket_variables("eth0") == "NCCL_SOCKET_IFNAME==eth0"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("ib0", "=eth0")
    assert set_socket_variables("eth1") == ""


def test_an_address_that_no_interface_leads_to() -> None:
    assert towards("127.0.0.1", {"eth0": ["10.0.0.5"]}) is None
    assert towards("not numeric", {}) is None
