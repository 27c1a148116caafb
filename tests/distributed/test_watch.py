"""The watch: requests to stop reach every rank, failures and silence end the others with the culprit's name."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from fedspec_dist.processes import stop as stop_module
from fedspec_dist.processes import watch as watch_module
from fedspec_dist.processes.stop import StopRequest, last_stop
from fedspec_dist.processes.watch import Watch


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes given to `os._exit`; the watch is made ten times faster."""
    codes: list[int] = []
    monkeypatch.setattr(watch_module, "_POLL_S", 0.02)
    monkeypatch.setattr(watch_module, "_GRACE_S", 0.1)
    monkeypatch.setattr(watch_module, "_SILENCE_S", 0.5)
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.fixture
def ranks(exits: list[int]) -> Iterator[Callable[..., list[Watch]]]:
    started: list[Watch] = []

    def start(num: int, store: dist.Store | None = None, running: int | None = None) -> list[Watch]:
        store = store or dist.HashStore()
        ranks = [Watch(store, rank, num, StopRequest(), lambda: "") for rank in range(num)]
        for rank in ranks[:running]:
            rank.start()
            started.append(rank)
        return ranks

    yield start
    for rank in started:
        rank.close()


def _eventually(condition: Callable[[], object], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def _tcp_store() -> dist.Store:
    return dist.TCPStore("localhost", 0, world_size=1, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("make_store", [dist.HashStore, _tcp_store])
def test_a_request_to_stop_reaches_every_rank(
    make_store: Callable[[], dist.Store], ranks: Callable[..., list[Watch]], exits: list[int]
) -> None:
    watches = ranks(3, make_store())
    watches[1]._stop_request.set("SIGTERM")
    assert _eventually(lambda: all(watch._stop_request for watch in watches))
    assert {watch._stop_request.reason for watch in watches} == {"SIGTERM"}
    assert exits == []


def test_a_failure_ends_the_others_with_its_summary(
    ranks: Callable[..., list[Watch]], exits: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    watches = ranks(3)
    assert watches[2].report_failure("ValueError: client 7 is broken")
    assert not watches[0].report_failure("a consequence"), "only the first failure is shown"
    assert _eventually(lambda: len(exits) == 2)
    assert exits == [1, 1]
    assert "rank 2 on" in caplog.text
    assert "failed: ValueError: client 7 is broken; ending this rank" in caplog.text
    failure = watches[1].failure()
    assert failure is not None
    assert failure["rank"] == 2


def test_a_rank_that_ends_by_itself_in_time_is_let_go(ranks: Callable[..., list[Watch]], exits: list[int]) -> None:
    watches = ranks(2)
    watches[1].report_failure("gone")
    watches[0].close()
    time.sleep(0.3)
    assert exits == []


def test_a_silent_rank_is_named(
    ranks: Callable[..., list[Watch]], exits: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    ranks(3, running=2)
    assert _eventually(lambda: len(exits) == 2)
    assert "rank 2 has not answered" in caplog.text


def test_a_rank_that_said_goodbye_may_be_silent(ranks: Callable[..., list[Watch]], exits: list[int]) -> None:
    watches = ranks(2)
    time.sleep(0.1)
    watches[1].close()
    time.sleep(1.0)
    assert exits == []


def test_who_was_stopped_himself_does_not_blame_the_others(ranks: Callable[..., list[Watch]], exits: list[int]) -> None:
    watches = ranks(2, running=1)
    for _ in range(5):
        watches[0]._silent_rank(paused=True)
        time.sleep(0.15)
        assert watches[0]._silent_rank(paused=True) is None


class _LostStore:
    def __getattr__(self, name: str) -> object:
        def lost(*_: object) -> None:
            raise RuntimeError("Connection reset by peer")

        return lost


def test_a_lost_store_ends_the_rank(
    ranks: Callable[..., list[Watch]], exits: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (watch,) = ranks(1, _LostStore())  # type: ignore[arg-type]
    assert _eventually(lambda: exits)
    assert "lost contact with the rendezvous store" in caplog.text
    assert watch.report_failure("x"), "with nobody left to tell, one shows one's own message"
    assert watch.failure() is None
    assert watch.elsewhere() == []


def test_who_was_in_no_collective_is_named(exits: list[int]) -> None:
    store = dist.HashStore()
    places = ["gathering", "gathering", ""]
    watches = [Watch(store, r, 3, StopRequest(), lambda r=r: places[r]) for r in range(3)]  # type: ignore[misc]
    for watch in watches:
        watch.start()
    assert _eventually(lambda: len(watches[0].elsewhere()) == 1)
    assert watches[0].elsewhere() == [f"rank 2 on {os.uname().nodename}"]
    for watch in watches:
        watch.close()


# ------------------------------------------------------------------------------------------ signals


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    request = StopRequest()
    request.install()
    yield request
    request.uninstall()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_is_a_request_to_stop(number: signal.Signals, stop: StopRequest) -> None:
    assert not stop
    os.kill(os.getpid(), number)
    assert stop
    assert stop.reason == number.name


def test_the_first_reason_stays(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reason == "SIGUSR1"


def test_a_signal_is_seen_before_its_handler_runs(stop: StopRequest) -> None:
    stop.poll()
    stop._writer.send(bytes([signal.SIGUSR2]))  # as the kernel does while the main thread is in a collective
    stop.poll()
    assert stop.reason == "SIGUSR2"


def test_ctrl_c_counts_once_when_it_comes_twice_at_once_and_interrupts_when_pressed_again(
    stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # torchrun passes on what the terminal has sent already
    assert stop.reason == "SIGINT"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 5)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_uninstalling_gives_the_signals_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest()
    request.install()
    assert signal.getsignal(signal.SIGTERM) != before
    request.uninstall()
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_stopped_the_latest_run_is_known_after_it() -> None:
    for number in (signal.SIGUSR2, signal.SIGTERM):
        request = StopRequest()
        request.install()
        assert last_stop() is None, "a new run has not been stopped yet"
        os.kill(os.getpid(), number)
        request.uninstall()
        assert last_stop() == number.name


def test_every_rank_knows_what_stopped_the_job_before_it_ends(
    ranks: Callable[..., list[Watch]], exits: list[int]
) -> None:
    watches = ranks(2)
    watches[1]._stop_request.set("SIGUSR2")  # just now; the thread of rank 0 may look a moment later
    watches[1].close()
    watches[0].learn_reason()
    assert watches[0]._stop_request.reason == "SIGUSR2"


def test_waiting_for_the_reason_ends(
    ranks: Callable[..., list[Watch]], exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "_LAST_S", 0.2)
    (watch, _) = ranks(2)
    watch.learn_reason()
    assert not watch._stop_request


def test_the_rank_with_the_store_is_the_last_to_leave(
    ranks: Callable[..., list[Watch]], exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "_LAST_S", 1.0)
    watches = ranks(2)
    other = threading.Timer(0.4, watches[1].close)
    other.start()
    began = time.monotonic()
    watches[0].close(last=True)
    assert 0.3 < time.monotonic() - began < 0.9
    other.join()
    (alone, _) = ranks(2, running=1)
    began = time.monotonic()
    alone.close(last=True)  # who never comes is not waited for without end
    assert time.monotonic() - began < 3


def test_the_log_is_errors(caplog: pytest.LogCaptureFixture, exits: list[int]) -> None:
    Watch(dist.HashStore(), 0, 1, StopRequest())._end("because")
    assert exits == [1]
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.ERROR, "because; ending this rank")]


# ------------------------------------------------------------------------------------------ patience


@pytest.fixture
def pair(exits: list[int]) -> Iterator[Callable[..., Watch]]:
    """The watch of a rank that waits in a collective since now, beside another whose main thread is this test's."""
    started: list[Watch] = []

    def start(others_place: str = "") -> Watch:
        store = dist.HashStore()
        places = ["a sum", others_place]
        for rank in range(2):
            started.append(Watch(store, rank, 2, StopRequest(), lambda rank=rank: places[rank], timeout_s=0.3))  # type: ignore[misc]
            started[-1].start()
        assert _eventually(lambda: started[-1]._told)
        return started[-2]

    yield start
    for watch in started:
        watch.close()


def _work(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def test_who_works_is_waited_for(pair: Callable[..., Watch]) -> None:
    watch, since = pair(), time.monotonic()
    _work(1.0)
    assert watch.trouble(since) == ""


def test_the_time_limit_counts_from_the_last_work_that_was_seen(pair: Callable[..., Watch]) -> None:
    watch, since = pair(), time.monotonic()
    _work(0.5)
    assert watch.trouble(since) == ""
    time.sleep(0.5)
    assert "no other rank has done any work for 0 s (runtime.timeout_s)" in watch.trouble(since)


def test_who_answers_but_is_stuck_is_not_waited_for(pair: Callable[..., Watch]) -> None:
    watch, since = pair(), time.monotonic()
    assert watch.trouble(since) == ""
    time.sleep(0.8)
    assert "runtime.timeout_s" in watch.trouble(since)
    assert watch.elsewhere() == [f"rank 1 on {os.uname().nodename}"]


def test_who_waits_in_another_collective_is_not_waited_for(pair: Callable[..., Watch]) -> None:
    watch, since = pair("a product"), time.monotonic()
    _work(0.5)
    assert "runtime.timeout_s" in watch.trouble(since)
    assert watch.elsewhere() == [f"rank 1 on {os.uname().nodename} (in a product)"]


def test_what_ends_a_rank_is_told_in_a_collective_at_once(ranks: Callable[..., list[Watch]], exits: list[int]) -> None:
    watches = ranks(2)
    watches[1].report_failure("ValueError: broken")
    assert _eventually(lambda: watches[0].trouble(time.monotonic()))
    assert "rank 1 on" in watches[0].trouble(time.monotonic())
    assert "ValueError: broken" in watches[0].trouble(time.monotonic())


# ------------------------------------------------------------------------------------------ what cannot be cut short


@pytest.mark.parametrize(("name", "ends"), [("SIGTERM", True), ("SIGUSR2", False)])
def test_after_sigterm_a_computation_that_cannot_be_cut_short_is_ended(
    name: str, ends: bool, stop: StopRequest, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_module, "_UNCUT_S", 0.2)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    stop.set(name)
    time.sleep(0.3)
    assert exits == [], "between computations the main thread sees it by itself"
    with stop.uncut("the step"):
        time.sleep(0.3)
    assert bool(exits) is ends
    assert set(exits) <= {75}
