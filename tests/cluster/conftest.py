"""One SLURM for all tests of a session, empty between them, and a time limit for each test."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.cluster.slurm_cluster import CannotBeHad, Cluster

TEST_LIMIT_S = 240


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="fs-slurm-", dir="/tmp") as folder, Cluster(Path(folder)) as cluster:
        try:
            cluster.start()
        except CannotBeHad as reason:
            pytest.skip(f"no SLURM here: {reason}")
        yield cluster


@pytest.fixture
def slurm(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, all nodes idle; jobs that a test leaves are cancelled."""
    yield running_cluster
    running_cluster.clear()


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that hangs fails; what it started on the cluster ends with `slurm`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{request.node.name} took longer than {TEST_LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(TEST_LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
