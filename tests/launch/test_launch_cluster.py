"""From the `cluster` section to what sbatch gets."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedspec_dist.config import Cluster, Config, ConfigError, load
from launch.cluster import LAUNCHER_VARIABLES, Layout, check, check_path, layout, sbatch_parameters, sbatch_text
from launch.cluster import setup_lines as setup

HOSTILE = ["with space", "it's", 'double"quote', "größe-мир", "$HOME`ls`;echo", "a=b", "#hash*?"]


def config(*overrides: str) -> Config:
    return load(None, overrides)


def text(*overrides: str, folder: Path = Path("/shared/run/submission/jobs/x"), **options: Any) -> str:
    array = options.pop("array", None)
    cluster = config(*overrides).cluster
    parameters = sbatch_parameters(cluster, "digits", ["true"], array=array or 0, **options)
    return sbatch_text(parameters, "/usr/bin/python", folder, array)


def lines(*overrides: str, **options: Any) -> list[str]:
    return text(*overrides, **options).splitlines()


# ------------------------------------------------------------------------------------------ layout


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], Layout(1, 1, 0)),
        (["cluster.nodes=3"], Layout(3, 1, 0)),
        (["cluster.gpus_per_node=4"], Layout(1, 4, 4)),
        (["cluster.gpus_per_node=4", "cluster.ranks_per_node=2"], Layout(1, 2, 4)),
        (["cluster.gpus_per_node=0", "cluster.ranks_per_node=8", "cluster.nodes=2"], Layout(2, 8, 0)),
        (["cluster.ranks_per_node=8"], Layout(1, 8, 0)),
    ],
)
def test_a_rank_for_each_gpu_unless_told_otherwise(overrides: list[str], expected: Layout) -> None:
    found = layout(config(*overrides).cluster)
    assert found == expected
    assert found.ranks == expected.nodes * expected.ranks_per_node


@pytest.mark.parametrize(
    ("overrides", "where", "message"),
    [
        ([], "cloud", r"--cluster: got 'cloud'; allowed: slurm, local, debug"),
        (["cluster.nodes=2"], "local", r"cluster.nodes: got 2, but --cluster local is this machine; allowed: 1"),
        (["cluster.ranks_per_node=2"], "debug", r"cluster.ranks_per_node: got 2, but --cluster debug is this process"),
        (["runtime.device=cuda", "cluster.gpus_per_node=0"], "slurm", r"runtime.device: got 'cuda' with cluster.gpus"),
        (
            ["cluster.gpus_per_node=2", "cluster.ranks_per_node=4"],
            "slurm",
            r"cluster.ranks_per_node: got 4 with 2 GPU\(s\) a node, and NCCL cannot share .* runtime.backend=gloo",
        ),
        (
            ["cluster.time=2m"],
            "slurm",
            r"cluster.signal_before_s: got 120 with cluster.time 2m, .* allowed: up to 90, or give a longer --time",
        ),
        (["cluster.extra.time=4"], "slurm", r"cluster.extra.time: has a key of its own; give cluster.time instead"),
        (["cluster.extra.mem=4"], "slurm", r"cluster.extra.mem: has a key of its own; give cluster.mem_gb instead"),
        (["cluster.extra.cpus_per_task=4"], "slurm", r"cluster.extra.cpus_per_task: has a key of its own"),
        (["cluster.extra.output=x"], "slurm", r"cluster.extra.output: is set by launch.submit itself"),
        (["cluster.extra.chdir=x"], "slurm", r"cluster.extra.chdir: is set by launch.submit itself"),
        (["cluster.extra.exclusive=false"], "slurm", r"cluster.extra.exclusive: got False; allowed: one line of text"),
        (["cluster.extra.comment=[1]"], "slurm", r"cluster.extra.comment: got \[1\]; allowed: one line of text"),
        (['cluster.extra.comment="a\\nb"'], "slurm", r"cluster.extra.comment: got 'a\\nb'; allowed: one line of text"),
        (["cluster.extra.A b=1"], "slurm", r"cluster.extra: got 'A b'; allowed: long options of sbatch"),
    ],
)
def test_what_cannot_be_submitted_is_refused_by_its_key(overrides: list[str], where: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config(*overrides), where)


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["cluster.time=2m"], "local"),
        (["cluster.gpus_per_node=2", "cluster.ranks_per_node=4", "runtime.backend=gloo"], "slurm"),
        (["runtime.device=cuda"], "slurm"),  # a site may give GPUs by gres, or by the partition alone
        (["cluster.time=1m", "cluster.signal_before_s=30"], "slurm"),
    ],
)
def test_what_can_be_submitted_is_not_refused(overrides: list[str], where: str) -> None:
    check(config(*overrides), where)


@pytest.mark.parametrize("name", ["a\nb", "50%", "back\\slash"])
def test_paths_that_slurm_would_read_otherwise_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"output: got .* cannot stand in the path of a submitted run"):
        check_path("output", Path("/runs") / name)


# ------------------------------------------------------------------------------------------ text


def test_the_options_of_every_key() -> None:
    found = lines(
        "cluster.nodes=2",
        "cluster.gpus_per_node=4",
        "cluster.cpus_per_rank=6",
        "cluster.mem_gb=1.5",
        "cluster.time=1d2h",
        "cluster.partition=gpu",
        "cluster.account=lab",
        "cluster.qos=high",
        "cluster.constraint=a100&ib",
        "cluster.exclude=n[1-3]",
        "cluster.signal_before_s=60",
        "cluster.extra.mail-type=END",
        "cluster.extra.exclusive=true",
    )
    expected = [
        "--account=lab",
        "--constraint='a100&ib'",
        "--cpus-per-task=6",
        "--exclude='n[1-3]'",
        "--exclusive",
        "--gpus-per-node=4",
        "--job-name=digits",
        "--mail-type=END",
        "--mem=1536M",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--open-mode=append",
        "--output=/shared/run/submission/jobs/x/%j_0_log.out",
        "--partition=gpu",
        "--qos=high",
        "--requeue",
        "--signal=USR2@60",
        f"--time={26 * 60}",
    ]
    assert [line for line in found if line.startswith("#SBATCH")] == [f"#SBATCH {option}" for option in expected]


def test_what_was_not_asked_for_is_not_in_it() -> None:
    found = text()
    for option in ("gpus", "cpus", "mem", "partition", "account", "qos", "constraint", "exclude", "wckey", "array"):
        assert f"#SBATCH --{option}" not in found
    assert "#SBATCH --ntasks-per-node=1" in found


def test_no_gpu_option_for_ranks_on_cpus() -> None:
    found = text("cluster.gpus_per_node=0", "cluster.ranks_per_node=8")
    assert "gpus" not in found
    assert "#SBATCH --ntasks-per-node=8" in found


def test_one_task_is_one_rank_and_a_dead_one_ends_the_others() -> None:
    (command,) = [line for line in lines("cluster.cpus_per_rank=3") if line.startswith("srun")]
    words = shlex.split(command)
    # srun of SLURM 22.05 to 23.02 does not take cpus-per-task over from sbatch
    assert {"--kill-on-bad-exit=1", "--open-mode=append", "--cpus-per-task=3"} <= set(words)
    assert words[-5:] == ["/usr/bin/python", "-u", "-m", "submitit.core._submit", "/shared/run/submission/jobs/x"]
    assert "torchrun" not in command


def test_an_array_is_bounded() -> None:
    assert "#SBATCH --array=0-4%2" in lines("cluster.array_parallelism=2", array=5)
    assert "#SBATCH --array=0-4%5" in lines(array=5)


def test_an_array_has_no_limit_unless_one_is_given() -> None:
    assert "#SBATCH --array=0-999%1000" in lines(array=1000), "submitit's own is 256"


# All texts of the section, whatever is added to it.
TEXTS = sorted(key for key, field in Cluster.model_fields.items() if field.annotation in (str, str | None))
SIGNS = ["\n", "\r", "\r\n", "\t", "\0", "\x1b", "\x85", "\u2028", "\x7f"]


@pytest.mark.parametrize("sign", SIGNS, ids=ascii)
@pytest.mark.parametrize("key", [*TEXTS, "extra.comment", "extra.mail-user", "name of the job"])
def test_no_text_of_the_section_gets_out_of_its_line(key: str, sign: str) -> None:
    hostile = f"gpu{sign}touch /tmp/pwned{sign}"
    given = load(None, ["rounds=3"])
    section = given.cluster.model_dump()
    if key.startswith("extra."):
        section["extra"] = {key.removeprefix("extra."): hostile}
    elif key in section:
        section[key] = hostile
    cluster = given.cluster.model_copy(update=section)
    name = hostile if key == "name of the job" else "digits"
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the time has a message of its own
        sbatch_parameters(cluster, name, ())
    if key != "time":
        assert str(raised.value).startswith(key if key.startswith("name") else f"cluster.{key}: got ")
        assert "\n" not in str(raised.value)
        if key != "name of the job":
            with pytest.raises(ConfigError):
                check(given.model_copy(update={"cluster": cluster}), "slurm")


def test_the_texts_of_the_section_are_those_that_one_knows() -> None:
    assert {"partition", "account", "qos", "constraint", "exclude", "time"} <= set(TEXTS)


def test_after_another_job_however_it_ended() -> None:
    assert "#SBATCH --dependency=afterany:123" in lines(after="123")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_paths_are_one_word_for_the_shell(name: str) -> None:
    folder = Path("/shared") / name
    (command,) = [line for line in lines(folder=folder) if line.startswith("srun")]
    words = shlex.split(command)
    assert words[-1] == str(folder)
    assert words[words.index("--output") + 1] == f"{folder}/%j_%t_log.out"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_reach_the_account_of_the_end(name: str, tmp_path: Path) -> None:
    """bash runs the set-up with a python that shows its arguments."""
    python = tmp_path / name / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"; echo "path $PYTHONPATH"; echo "rank ${RANK-unset}"\n')
    python.chmod(0o755)
    folder = tmp_path / name / "jobs"
    script = "\n".join([*setup(str(python), tmp_path / name, folder), "bash -c 'exit 7'"])
    variables = {**os.environ, "PYTHONPATH": "/other", "RANK": "3"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=variables, timeout=20)
    assert done.returncode == 7
    expected = [
        "-m",
        "launch.aftermath",
        "7",
        "0",
        str(folder),
        f"path {tmp_path / name}:/other",
        "rank unset",
    ]
    assert done.stdout.splitlines() == expected


def test_a_job_that_the_scheduler_ends_waits_for_its_tasks_and_says_so(tmp_path: Path) -> None:
    """SIGTERM to the batch script: it is noted, and srun (here: sleep) decides when the script ends."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$3 $4"\n')
    python.chmod(0o755)
    script = "\n".join([*setup(str(python), tmp_path, tmp_path), "kill -TERM $$; sleep 0.2; bash -c 'exit 143'"])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20)
    assert done.stdout.split() == ["143", "1"]
    assert done.returncode == 143


def test_without_a_python_path_it_is_ours(tmp_path: Path) -> None:
    script = "\n".join([*setup("true", tmp_path, tmp_path), 'trap - EXIT; echo "$PYTHONPATH"'])
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=variables, timeout=20)
    assert done.stdout.strip() == str(tmp_path)


def test_all_variables_of_torchrun_are_dropped() -> None:
    from torch.distributed.elastic.agent.server import local_elastic_agent

    source = Path(local_elastic_agent.__file__).read_text()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert f'"{name}"' in source, "torch names it otherwise now"
        assert name in LAUNCHER_VARIABLES


def test_what_a_login_node_runs_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, launch.submit, launch.job, launch.local, launch.status, launch.cancel, launch.follow\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
