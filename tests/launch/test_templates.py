"""The text of rendered job scripts, read by bash where quoting matters; `tests/cluster` submits them for real."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedspec_dist.config import ConfigError, load
from launch.templates import FOLDER, NAMES, main, render, values_of

FOLDER_OF_JOB = '/scratch/it\'s a "test" $HOME `id` #1 ; é 数据 &'
HOSTILE = '/scratch/it\'s a "test" $HOME `id` #1 ; é 数据 \\n & %j'


def values(name: str, *overrides: str, runs: tuple = (), folder: str = "/w", arguments: Any = ()) -> dict[str, Any]:
    runs = runs or ((("seed=0",), ("seed=1",)) if name == "array" else ())
    return values_of(name, load(None, overrides), arguments, Path(folder), "/venv/bin/python", runs)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_there_is_a_template_for_every_way_to_start() -> None:
    assert NAMES == ("array", "one_task_per_rank", "several_nodes", "single_node")


@pytest.mark.parametrize("name", NAMES)
def test_a_template_holds_nothing_of_one_site(name: str) -> None:
    text = (FOLDER / f"{name}.sbatch").read_text()
    assert not re.search(r"module load|/home/|/scratch|conda|@\w+\.\w+", text)
    for option in ("partition", "account", "qos", "constraint", "exclude", "time", "mem", "chdir"):
        assert re.search(rf"^#SBATCH --{option}=\{{\{{\w+\}}\}}M?$", text, re.MULTILINE), option


@pytest.mark.parametrize("name", NAMES)
def test_a_rendered_script_is_bash_and_has_no_placeholder_left(name: str) -> None:
    text = render(name, values(name, folder=FOLDER_OF_JOB, arguments=["a b.yaml"]))
    assert "{{" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_can_be_stopped_and_started_again(name: str) -> None:
    text = render(name, values(name, "cluster.signal_before_s=77", "cluster.max_requeues=3"))
    assert {"--requeue", "--open-mode=append", "--signal=B:USR2@77"} <= set(directives(text))
    assert '[ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]' in text
    assert "srun --export=ALL --kill-on-bad-exit=1" in text


def test_the_templates_stop_and_start_again_in_the_same_way() -> None:
    texts = [(FOLDER / f"{name}.sbatch").read_text() for name in NAMES]
    assert len({text[text.index("step=$!") :] for text in texts}) == 1
    assert len({re.search(r"# sbatch copies.*?USR2\n", text, re.DOTALL)[0] for text in texts}) == 1  # type: ignore[index]


def test_what_is_not_asked_for_has_no_line() -> None:
    assert directives(render("single_node", values("single_node"))) == [
        "--job-name=digits-specgrad",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--time=60",
        "--chdir=/w",
        "--output=%x-%j.out",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR2@120",
    ]


def test_what_is_asked_for_is_in_the_script() -> None:
    overrides = [
        "cluster={nodes: 2, gpus_per_node: 4, cpus_per_rank: 3, mem_gb: 1.5, time: 1d12h, partition: gpu, "
        "account: a b, qos: high, constraint: 'a&b', exclude: 'n[1-2]', extra: {comment: \"it's #1\", exclusive: true}}"
    ]
    found = directives(render("several_nodes", values("several_nodes", *overrides)))
    assert found[1:15] == [
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=12",
        "--gpus-per-node=4",
        "--mem=1536M",
        "--time=2160",
        "--partition=gpu",
        '--account="a b"',
        "--qos=high",
        '--constraint="a&b"',
        "--exclude=n[1-2]",
        '"--comment=it\'s #1"',
        "--exclusive",
        "--chdir=/w",
    ]
    text = render("several_nodes", values("several_nodes", *overrides))
    assert "--nnodes=2 --nproc-per-node=4 " in text


def test_a_little_memory_is_not_none() -> None:
    assert "--mem=1M" in directives(render("single_node", values("single_node", "cluster.mem_gb=0.0004")))


def test_all_memory_of_a_node() -> None:
    assert "--mem=0M" in directives(render("single_node", values("single_node", "cluster.mem_gb=0")))


def test_a_task_for_each_rank() -> None:
    text = render("one_task_per_rank", values("one_task_per_rank", "cluster={nodes: 2, ranks_per_node: 3}"))
    assert {"--nodes=2", "--ntasks-per-node=3", "--cpus-per-task=1"} <= set(directives(text))
    assert "torch.distributed.run" not in text


@pytest.mark.parametrize("name", NAMES)
def test_bash_sees_hostile_arguments_as_they_are(name: str) -> None:
    arguments = [f"{HOSTILE}/x.yaml", "name=a", "data.root='; exit 3; '", "*", "$(id)"]
    text = render(name, values(name, arguments=arguments, runs=((HOSTILE,), ("b c",)) if name == "array" else ()))
    start, end = text.index("python="), text.index("# sbatch copies")
    show = """printf '%s\\0' "${arguments[@]}"\n"""
    for index in range(2 if name == "array" else 1):
        script = f"SLURM_ARRAY_TASK_ID={index}\n{text[start:end]}{show}"
        seen = subprocess.run(["bash", "-eu"], input=script, capture_output=True, text=True, check=True).stdout
        expected = [*arguments, *([(HOSTILE,), ("b c",)][index] if name == "array" else [])]
        assert seen.split("\0")[:-1] == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("/a/b-c_d.e:f", "/a/b-c_d.e:f"),
        ("/a b#c'd&é", '"/a b#c\'d&é"'),
        ('/a"b', r'"/a\"b"'),
    ],
)
def test_a_directive_is_quoted_as_sbatch_reads_it(text: str, line: str) -> None:
    assert f"--chdir={line}" in directives(render("single_node", values("single_node", folder=text)))


def test_a_backslash_in_a_directive_is_doubled() -> None:
    text = render("single_node", values("single_node") | {"account": r"a\b"})
    assert r'--account="a\\b"' in directives(text)


@pytest.mark.parametrize("sign", ["%", "\\", "\n"])
def test_a_folder_whose_log_slurm_would_not_find_is_refused(sign: str) -> None:
    with pytest.raises(ConfigError, match=r"the folder of the job: got .*; .* cannot stand in the path"):
        values("single_node", folder=f"/a{sign}b")


def test_an_array_has_a_run_a_line() -> None:
    text = render(
        "array", values("array", "cluster.array_parallelism=4", arguments=["c.yaml"], runs=(("a=1",), ("a=2",)))
    )
    assert "--array=0-1%4" in directives(text)
    assert "    0) arguments=(c.yaml a=1) ;;\n    1) arguments=(c.yaml a=2) ;;\n    *) echo" in text
    assert "--array=0-1" in directives(render("array", values("array")))


@pytest.mark.parametrize("sign", ["\n", "\r", "\0", "\x1b"])
@pytest.mark.parametrize("key", ["folder", "python", "arguments", "partition"])
def test_a_line_break_is_refused(key: str, sign: str) -> None:
    bad = values("single_node") | {key: [f"a{sign}b"] if key == "arguments" else f"a{sign}b"}
    with pytest.raises(ValueError, match=rf"{key}: got .*; allowed: text without line breaks and control characters"):
        render("single_node", bad)


def test_a_script_without_an_interpreter_is_refused() -> None:
    with pytest.raises(ValueError, match="python: got None; allowed: text"):
        render("single_node", values("single_node") | {"python": None})


def test_an_unknown_template_is_refused() -> None:
    with pytest.raises(ValueError, match="template: got 'x'; allowed: array, one_task_per_rank, several_nodes, single"):
        render("x", {})


def test_values_must_fit_the_template() -> None:
    fitting = values("single_node")
    with pytest.raises(ValueError, match=r"single_node: values missing: \['folder'\], unknown: \['fold'\]"):
        render("single_node", {key: value for key, value in fitting.items() if key != "folder"} | {"fold": 1})


@pytest.mark.parametrize("name", ["single_node", "array"])
def test_several_nodes_need_a_template_for_them(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"cluster.nodes: got 2, but a run of {name} has one node; allowed: 1"):
        values(name, "cluster.nodes=2")


def test_runs_are_for_arrays() -> None:
    with pytest.raises(ConfigError, match="--run: once for each run of an array, and for array only"):
        values("single_node", runs=(("seed=1",),))
    with pytest.raises(ConfigError, match="--run: once for each run of an array"):
        values_of("array", load(None), [], Path("/"), "python")


def test_the_command_line_prints_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["array", "rounds=3", "--run", "seed=0 name='a'", "--run", "seed=1", "--python", "py"]) == 0
    text = capsys.readouterr().out
    assert "0) arguments=(rounds=3 seed=0 name=a) ;;" in text
    assert f"--chdir={Path.cwd()}" in text.replace("\\", "").replace('"', "")
    assert "python=py\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["single_node", "rounds=0"], "rounds"),
        (["array", "--run", "seed=x"], "seed"),
        (["nothing"], "template: got 'nothing'"),
        (["single_node", "a.yaml", "b.yaml"], "one config file, got a.yaml, b.yaml"),
        (["array", "--run", "name='a"], "No closing quotation"),
    ],
)
def test_the_command_line_refuses_what_cannot_run(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_command_line_needs_no_torch() -> None:
    program = (
        "import sys, launch.templates as t; assert t.main(['array', '--run', '']) == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=Path(__file__).parents[2])


def test_what_shlex_joins_is_what_bash_splits() -> None:
    assert shlex.split(shlex.join([HOSTILE])) == [HOSTILE]
