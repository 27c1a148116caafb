"""What the launcher's environment means, and what is said when it makes no sense."""

from __future__ import annotations

import logging

import pytest

from fedspec_dist.processes.environment import (
    Environment,
    LaunchError,
    is_first,
    read_environment,
    tasks_per_node,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node3",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_torchruns_variables() -> None:
    assert read_environment(TORCHRUN) == Environment(5, 8, 1, 4, True, restarts=2)


# The sixth of eight tasks, the second of three on its node, as srun sets it.
STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4,3,1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
LOCAL = {
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_JOB_ID": "99",
}
AGREEING = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def test_a_plain_process_is_one_rank() -> None:
    assert read_environment({}) == Environment()
    # A batch script may export an address without starting ranks; an allocation sets variables for the job.
    assert read_environment({"MASTER_ADDR": "x", "MASTER_PORT": "1", "SLURM_NTASKS": "4"}) == Environment()
    assert read_environment({"SLURM_STEP_NUM_TASKS": "1", "SLURM_RESTART_COUNT": "1"}) == Environment(restarts=1)


def test_tasks_that_nobody_started_are_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    read_environment({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"})
    assert caplog.text == ""
    read_environment({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})  # a batch script
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "this SLURM job has 4 tasks, but one process runs alone: srun did not start it" in caplog.text


def test_one_task_a_node_with_torchrun_inside() -> None:
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    assert read_environment(TORCHRUN | slurm) == Environment(5, 8, 1, 4, True, restarts=2)


def test_a_slurm_task_is_a_rank() -> None:
    assert read_environment(STEP) == Environment(5, 8, 1, 3, True, attempt="1234.0.0")
    requeued = read_environment(STEP | {"SLURM_RESTART_COUNT": "2"})
    assert (requeued.restarts, requeued.attempt) == (2, "1234.0.2")


def test_a_task_of_submitit_on_one_host_is_a_rank_also_inside_a_slurm_job() -> None:
    assert read_environment(LOCAL) == Environment(1, 2, 1, 2, True, attempt="local-99.0")
    assert read_environment(STEP | LOCAL).num_ranks == 2
    assert read_environment(LOCAL | {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"}) == Environment()


def test_variables_of_torchrun_beside_those_of_slurm_have_to_agree() -> None:
    assert read_environment(STEP | AGREEING) == read_environment(STEP)
    # With an address the ranks meet there.
    address = {"MASTER_ADDR": "node3", "MASTER_PORT": "29500"}
    assert read_environment(STEP | AGREEING | address).attempt == ""
    assert read_environment(STEP | address).attempt == ""
    assert read_environment(STEP | {"MASTER_ADDR": "node3"}).attempt == "1234.0.0"


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("4(x2)", [4, 4]), ("4,3,1", [4, 3, 1]), ("2(x3),1", [2, 2, 2, 1])]
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"RANK": "1"}, False),
        ({"RANK": "0", "SLURM_PROCID": "1"}, True),  # torchrun on the second node
        (STEP, False),
        (STEP | {"SLURM_PROCID": "0"}, True),
        (LOCAL, False),
    ],
)
def test_who_speaks_for_the_job(variables: dict[str, str], first: bool) -> None:
    assert is_first(variables) == first


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"SLURM_PROCID, .* not set, but SLURM_STEP_NUM_TASKS is 4: srun sets all"),
        (STEP | {"SLURM_PROCID": "8"}, r"SLURM_PROCID is 8 but SLURM_STEP_NUM_TASKS is 8: ranks count from 0"),
        (STEP | {"SLURM_LOCALID": "x"}, r"SLURM_LOCALID: got 'x' in the environment; allowed: a number from 0"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x"}, r"SLURM_STEP_TASKS_PER_NODE: got '4\(x' .*; allowed: such as 4"),
        (STEP | {"RANK": "0"}, r"RANK is 0 but SLURM_PROCID is 5: .* left over .*unset RANK WORLD_SIZE LOCAL_RANK"),
        (STEP | {"WORLD_SIZE": "4"}, r"WORLD_SIZE is 4 but SLURM_STEP_NUM_TASKS is 8"),
        (LOCAL | {"LOCAL_RANK": "0"}, r"LOCAL_RANK is 0 but SUBMITIT_LOCAL_LOCALID is 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set, but RANK, WORLD_SIZE are"),
        (TORCHRUN | STEP, r"two launch styles at once: 3 tasks were started on this node and each started torchrun"),
        (TORCHRUN | LOCAL, r"two launch styles at once: 2 tasks were started on this node"),
        (TORCHRUN | {"RANK": "one"}, r"RANK: got 'one' in the environment; allowed: a number from 0"),
        (TORCHRUN | {"WORLD_SIZE": ""}, r"WORLD_SIZE: got ''"),
        (TORCHRUN | {"RANK": "8"}, r"RANK is 8 but WORLD_SIZE is 8"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(variables: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_environment(variables)
