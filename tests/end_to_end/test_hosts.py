"""Jobs on two hosts, and jobs whose tasks a scheduler starts without torchrun."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.cli import Ended, Job, results_of, rounds_done, run
from tests.end_to_end.hosts import Hosts, NoHostsError, address, two_hosts

pytestmark = pytest.mark.slow

CONFIG = [
    "data.dataset=synthetic",
    "data.shape=[1, 8, 8]",
    "data.num_classes=4",
    "data.num_train=200",
    "data.num_test=50",
    "data.partition.clients=8",
    "model.width=8",
    "clients_per_round=4",
    "local.epochs=1",
    "rounds=2",
    "server.aggregator=fedgh",
]
PYTHON = [sys.executable, "-m"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("one")
    run(folder, *CONFIG).expect(0)
    return results_of(folder)


@contextlib.contextmanager
def _hosts(folder: Path, name_to: str) -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts(folder, name_to))
        except NoHostsError as error:
            pytest.skip(f"two hosts cannot be had here: {error}")
        yield hosts


def _task(rank: int, num_ranks: int, nodes: int = 1) -> dict[str, str]:
    """What srun sets, with as many tasks on each node."""
    per_node = num_ranks // nodes
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(num_ranks),
        "SLURM_STEP_NUM_TASKS": str(num_ranks),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_LOCALID": str(rank % per_node),
    }


def _all(jobs: list[Job], timeout_s: float = 90) -> list[Ended]:
    with contextlib.ExitStack() as stack:
        for job in jobs:
            stack.enter_context(job)
        return [job.wait(timeout_s) for job in jobs]


def _tasks_on(hosts: Hosts, folder: Path, *arguments: str, **variables: str) -> list[Ended]:
    """A task on each host, as srun starts them."""
    command = [*PYTHON, "fedspec_dist.main", *CONFIG, *arguments]
    return _all([Job(hosts.command(host, *command), folder, _task(host, 2, 2) | variables) for host in range(2)])


# ---------------------------------------------------------------------------------------- tasks of a scheduler


def test_tasks_of_slurm_on_one_host_give_the_same_bits(tmp_path: Path, one_process: Any) -> None:
    command = [*PYTHON, "fedspec_dist.main", *CONFIG]
    first, *others = _all([Job(command, tmp_path, _task(rank, 3)) for rank in range(3)])
    first.expect(0, "3 rank(s), gloo")
    assert [(other.code, other.output) for other in others] == [(0, ""), (0, "")], "only rank 0 talks"
    assert results_of(tmp_path) == one_process
    assert not list(tmp_path.rglob(".meeting")), "the file has gone with its start"


def test_tasks_of_submitits_local_executor_are_ranks(tmp_path: Path, one_process: Any) -> None:
    local = {"SUBMITIT_LOCAL_JOB_ID": "1", "SUBMITIT_LOCAL_NTASKS": "2"}
    tasks = [local | {f"SUBMITIT_LOCAL_{name}ID": str(rank) for name in ("GLOBAL", "LOCAL")} for rank in range(2)]
    for ended in _all([Job([*PYTHON, "fedspec_dist.main", *CONFIG], tmp_path, task) for task in tasks]):
        ended.expect(0)
    assert results_of(tmp_path) == one_process


def test_a_task_that_never_starts_is_named_with_those_that_did(tmp_path: Path) -> None:
    command = [*PYTHON, "fedspec_dist.main", *CONFIG, "runtime.timeout_s=8"]
    first, second = _all([Job(command, tmp_path, _task(rank, 3)) for rank in range(2)])
    first.expect(2, "rank 0 on ", "ranks [2] did not come within 8 s (runtime.timeout_s); there are rank 0 (", "1 (")
    assert second.code != 0


def test_every_rank_of_a_stopped_job_knows_what_stopped_it(tmp_path: Path) -> None:
    script = "import sys; from fedspec_dist.main import main; from fedspec_dist.processes.stop import last_stop; "
    script += "print('code', main(sys.argv[1:]), 'stopped by', last_stop(), flush=True)"
    command = [sys.executable, "-c", script, *CONFIG, "rounds=1000"]
    jobs = [Job(command, tmp_path, _task(rank, 2)) for rank in range(2)]
    with jobs[0], jobs[1]:
        jobs[0].wait_until(lambda: rounds_done(tmp_path) >= 2, "round 2")
        jobs[1].process.send_signal(signal.SIGUSR2)
        for job in jobs:
            job.wait(30).expect(0, "code 75 stopped by SIGUSR2")


def test_two_nodes_that_share_data_root_prepare_one_data_set(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(256, size=(20_000, 8, 8, 1), dtype=np.uint8), np.arange(20_000) % 4
    np.savez(
        tmp_path / "x.npz",
        train_images=images,
        train_labels=labels,
        test_images=images[:100],
        test_labels=labels[:100],
    )
    arguments = ["data.dataset=npz", f"data.path={tmp_path}/x.npz", f"data.root={tmp_path}/data", "rounds=1"]
    arguments += ["data.partition={type: iid, clients: 200}", "model.width=8", "clients_per_round=2", "local.epochs=1"]
    command = [*PYTHON, "fedspec_dist.main", *arguments]
    for ended in _all([Job(command, tmp_path, _task(rank, 2, nodes=2)) for rank in range(2)]):
        ended.expect(0)
    (prepared,) = (tmp_path / "data" / "prepared").iterdir()
    assert prepared.name.startswith("npz-")


# ---------------------------------------------------------------------------------------- two hosts


@pytest.mark.parametrize("name_to", ["slow", "loopback", ""])
def test_tasks_of_slurm_on_two_hosts(name_to: str, tmp_path: Path, one_process: Any) -> None:
    """Whether a host's name leads to it, to loopback or nowhere."""
    with _hosts(tmp_path, name_to) as hosts:
        first, second = _tasks_on(hosts, tmp_path)
    first.expect(0, "2 rank(s), gloo")
    second.expect(0)
    assert ("set here: GLOO_SOCKET_IFNAME=slow NCCL_SOCKET_IFNAME==slow" in first.output) == (name_to != "slow")
    if name_to != "slow":
        assert "the host name leads to no address that other hosts can reach, on node1, node2" in first.output
    assert results_of(tmp_path) == one_process


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    with _hosts(tmp_path, "loopback") as hosts:
        first, _ = _tasks_on(hosts, tmp_path, GLOO_SOCKET_IFNAME="fast")
    first.expect(0, "set here: NCCL_SOCKET_IFNAME==slow")
    assert "GLOO_SOCKET_IFNAME=" not in first.output


def test_the_named_interface_carries_the_traffic(tmp_path: Path, one_process: Any) -> None:
    with _hosts(tmp_path, "slow") as hosts:
        first, second = _tasks_on(hosts, tmp_path, "runtime.interface=fast")
        sent = {network: hosts.bytes_sent(0, network) for network in ("slow", "fast")}
    first.expect(0, "set here: GLOO_SOCKET_IFNAME=fast NCCL_SOCKET_IFNAME==fast (runtime.interface)")
    second.expect(0)
    assert sent["fast"] > 20_000 > 2_000 > sent["slow"], sent
    assert results_of(tmp_path) == one_process


def test_an_interface_that_a_host_lacks_is_named_with_those_it_has(tmp_path: Path) -> None:
    with _hosts(tmp_path, "slow") as hosts:
        first, _ = _tasks_on(hosts, tmp_path, "runtime.interface=ib0", "runtime.timeout_s=5")
    message = "runtime.interface: got 'ib0', but node1 has no such interface with an address; allowed there: lo (127."
    first.expect(2, message, "slow (10.77.0.1), fast (10.77.1.1)")


@pytest.mark.parametrize("name_to", ["slow", "loopback"])
def test_a_torchrun_on_each_of_two_hosts(name_to: str, tmp_path: Path, one_process: Any) -> None:
    options = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "7"]
    options += ["--rdzv-endpoint", f"{address(0, 'slow')}:29400"]
    jobs = []
    with _hosts(tmp_path, name_to) as hosts:
        for host in range(2):
            # torchrun too tells others its host name, unless it is given an address.
            own = ["--local-addr", address(host, "slow")] if name_to != "slow" else []
            own += ["--rdzv-conf", f"is_host={int(host == 0)}"]
            program = ["torch.distributed.run", *options, *own, "-m", "fedspec_dist.main", *CONFIG]
            jobs.append(Job(hosts.command(host, *PYTHON, *program), tmp_path, {}))
        first, second = _all(jobs)
    output = first.output + second.output  # torchrun chooses which of them has rank 0
    first.expect(0)
    second.expect(0)
    assert "2 rank(s), gloo" in output
    assert ("set here: GLOO_SOCKET_IFNAME=slow" in output) == (name_to != "slow")
    assert results_of(tmp_path) == one_process
