"""Ranks without an address from their launcher find rank 0, and nobody else, through a file of the run folder."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fedspec_dist.processes import meeting
from fedspec_dist.processes.environment import Environment, LaunchError
from fedspec_dist.processes.meeting import clear, listen, meet, meeting_file

ATTEMPT = "12.0.0"


def _meet(folder: Path, rank: int, timeout_s: float = 20, addresses: Sequence[str] = ("127.0.0.1",)) -> Any:
    return meet(folder, Environment(rank, 2, rank, 2, True, attempt=ATTEMPT), timeout_s, addresses)


def _meet_late(folder: Path) -> Any:
    time.sleep(0.5)
    return _meet(folder, 0)


@pytest.fixture
def stale(tmp_path: Path) -> Iterator[Path]:
    """A folder with the file of a start that ended, whose port now belongs to another job's store."""
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other.set("token", "another's")
    file = meeting_file(tmp_path, ATTEMPT)
    file.parent.mkdir()
    file.write_text(json.dumps({"addresses": ["127.0.0.1"], "port": other.port, "token": "ended", "host": "node1"}))
    yield tmp_path
    del other


def test_ranks_meet_whoever_comes_first(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(_meet, tmp_path, 1)
        first, _ = pool.submit(_meet_late, tmp_path).result()
        second, address = other.result()
    first.set("hello", "x")
    assert second.get("hello") == b"x"
    assert second.clone().get("hello") == b"x"
    assert address == "127.0.0.1"


def test_neither_an_old_file_nor_another_jobs_store_is_taken_for_this_start(stale: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(_meet, stale, 1)
        first, _ = pool.submit(_meet_late, stale).result()
        assert other.result()[0].get("token") == first.get("token") != b"another's"


def test_an_address_that_leads_nowhere_is_passed_over(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        addresses = ["no.such.host.invalid", "127.0.0.99", "127.0.0.1"]
        first = pool.submit(meet, tmp_path, Environment(0, 2, attempt=ATTEMPT), 20, addresses, "127.0.0.1")
        _, address = pool.submit(_meet, tmp_path, 1).result()
        first.result()
    assert address == "127.0.0.1"


def test_a_rank_that_never_hears_of_rank_0_says_where_it_looked(tmp_path: Path) -> None:
    message = rf"rank 1 on {socket.gethostname()} waited 0 s .* for rank 0 to say in {meeting_file(tmp_path, ATTEMPT)}"
    with pytest.raises(LaunchError, match=message + r".*output= is not on a file system that all hosts"):
        _meet(tmp_path, 1, timeout_s=0.3)


def test_a_rank_that_cannot_reach_rank_0_says_where_it_tried(stale: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot reach rank 0 on node1 at 127\.0\.0\.1, port \d+\. .*interface=NAME"):
        _meet(stale, 1, timeout_s=0.3)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_file_that_is_no_meeting_point_is_waited_over(text: str, tmp_path: Path) -> None:
    file = meeting_file(tmp_path, ATTEMPT)
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(LaunchError, match="waited"):
        _meet(tmp_path, 1, timeout_s=0.3)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        LaunchError, match=r"output: rank 0 on .* cannot write .*choose another output=FOLDER, on a file"
    ):
        _meet(tmp_path / "file", 0)


def test_the_file_goes_when_all_have_met_and_nothing_else_does(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    store, _ = _meet(tmp_path, 0)
    assert [path.name for path in meeting_file(tmp_path, ATTEMPT).parent.iterdir()] == [ATTEMPT]
    clear(tmp_path, ATTEMPT)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    clear(tmp_path, ATTEMPT)
    meeting_file(tmp_path, "another").parent.mkdir()
    meeting_file(tmp_path, "another").write_text("")
    clear(tmp_path, ATTEMPT)
    assert meeting_file(tmp_path, "another").exists()
    del store


def test_ports_are_none_that_outgoing_connections_take() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for bind in ("", "127.0.0.1"):
        sockets = [listen(bind) for _ in range(50)]
        ports = {one.getsockname()[1] for one in sockets}
        for one in sockets:
            one.close()
        assert len(ports) == 50
        assert not [port for port in ports if first <= port <= last or port < 20000]


@pytest.mark.parametrize(
    ("ephemeral", "lowest", "highest", "count"),
    [((32768, 60999), 20000, 65535, 12768 + 4536), ((1024, 60999), 61000, 65535, 4536), ((15000, 65535), 0, 0, 0)],
)
def test_ports_outside_a_range(ephemeral: tuple[int, int], lowest: int, highest: int, count: int) -> None:
    ports = meeting._ports_outside(ephemeral)
    assert len(ports) == count
    if count:
        assert (min(ports), max(ports)) == (lowest, highest)


def test_where_all_ports_are_ephemeral_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ephemeral", lambda: (1024, 65535))
    with listen("127.0.0.1") as one:
        assert one.getsockname()[1] >= 1024
    monkeypatch.setattr(meeting, "_RANGE_FILE", Path("/nonexistent"))
    with listen("") as one:
        assert one.getsockname()[1]
