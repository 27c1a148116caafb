"""What ranks conclude from each other's introductions: the interface between hosts, GPUs that two ranks have."""

from __future__ import annotations

import logging
import os
import time

import pytest
import torch.distributed as dist

from fedspec_dist.processes import interfaces, joining
from fedspec_dist.processes.environment import Environment, LaunchError
from fedspec_dist.processes.joining import come_together
from fedspec_dist.processes.rendezvous import Introduction, introduce

KNOWN = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}
HOME, GUEST = Introduction("node1", "", False), Introduction("node2", "10.0.0.5", False)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(interfaces, "towards", lambda address, known: {"10.0.0.5": "eth0"}.get(address))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "x")  # so that it is taken back afterwards
        monkeypatch.delenv(name)


def _interface(rank: int, everybody: list[Introduction], named: str | None = None) -> str | None:
    joining._choose_interface(rank, everybody, named, KNOWN)
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_on_one_host_nothing_is_set(caplog: pytest.LogCaptureFixture) -> None:
    assert _interface(0, [HOME, HOME]) is None
    assert caplog.text == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_between_hosts_with_misleading_names_both_ends_take_the_interface_between_them(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert _interface(rank, [HOME, GUEST]) == "eth0"
    assert "set here: GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME==eth0" in caplog.text
    assert "leads to no address that other hosts can reach, on node1, node2" in caplog.text


def test_hosts_whose_name_leads_to_them_need_nothing() -> None:
    assert _interface(0, [Introduction("node1", "", True), GUEST]) is None


def test_the_named_interface_is_set_everywhere() -> None:
    assert _interface(0, [Introduction("node1", "", True)] * 2, "ib0") == "ib0"


def test_where_no_interface_leads_to_the_others_the_user_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = Introduction("node2", "192.0.2.1", False)
    assert _interface(0, [HOME, elsewhere]) is None
    assert "no interface leads to 192.0.2.1: name one with runtime.interface=NAME" in caplog.text


def test_two_ranks_with_one_gpu_are_named() -> None:
    gpus = ["GPU-a", "GPU-b", "GPU-a"]
    with pytest.raises(LaunchError, match=r"ranks 0, 2 on node1 have the same GPU \(GPU-a\).*runtime\.backend=gloo"):
        joining._refuse_shared_gpus([Introduction("node1", "", True, gpu) for gpu in gpus])
    joining._refuse_shared_gpus([Introduction("node1", "", True, gpu) for gpu in ("GPU-a", "GPU-b", "", "")])


def test_slices_of_one_gpu_are_one_gpu_to_nccl() -> None:
    slices = [Introduction("node1", "", True, f"MIG-{rank}", "00:1b:00") for rank in range(2)]
    message = r"ranks 0, 1 on node1 have slices \(MIG\) of the same GPU .*one whole GPU a rank.*runtime\.backend=gloo"
    with pytest.raises(LaunchError, match=message):
        joining._refuse_shared_gpus(slices)
    # Hosts are alike inside.
    joining._refuse_shared_gpus([Introduction(f"node{rank}", "", True, f"GPU-{rank}", "00:1b:00") for rank in range(2)])


def test_everybody_is_introduced_to_everybody() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("introduction/1", '{"host": "node2", "reached": "10.0.0.5", "known": false, "gpu": ""}')
    assert introduce(store, 0, 2, HOME) == [HOME, GUEST]


def test_an_address_where_nobody_is_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    message = r"rank 1 on .* could not join the other 1 ranks .*They were to meet at 127\.0\.0\.1:1\. .*--standalone"
    began = time.monotonic()
    with pytest.raises(LaunchError, match=message):
        come_together(Environment(1, 2, 1, 2, True), 2.0, None, None)
    assert time.monotonic() - began < 4, "one time limit, not one for each of several tries"


def test_ranks_that_do_not_come_are_named_with_those_that_did(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    environment = Environment(0, 3, 0, 3, True, attempt="1.0.0")
    message = (
        r"ranks \[1, 2\] did not come within 0 s \(runtime\.timeout_s\); there are rank 0 \(.*\)\). "
        "Their own output may say"
    )
    with pytest.raises(LaunchError, match=message):
        come_together(environment, 0.2, None, tmp_path)
