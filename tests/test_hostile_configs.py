"""Configs that nobody means: one short message, exit code 2, in no time and little memory."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedspec_dist.doctor
import fedspec_dist.main
from fedspec_dist.config import DEFAULTS, ConfigError, load
from fedspec_dist.config.methods import FAMILIES
from launch import status, submit, sweep, templates
from tests.test_fingerprint import keys_of

ROOT = Path(__file__).parents[1]
DIGITS = "9" * 5000
LEVELS = [chr(ord("a") + depth) for depth in range(9)]
ALIASES = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{below}'] * 10)}]\n" for below, name in itertools.pairwise(LEVELS)
)
# A merge key takes the keys of all that it lists, before anything sees that they are the same.
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join([f'*{below}'] * 10)}]}}\n" for below, name in itertools.pairwise(LEVELS)
)

# What is typed, and how the message begins.
TYPED = {
    "a tag of YAML's": ("seed=!!timestamp x", "seed: '!!timestamp x' is not a YAML value"),
    "a date": ("name=!!timestamp 2024-01-01", "name: "),
    "an empty number": ("seed=!!int ''", "seed: "),
    "an empty float": ("local.lr=!!float ''", "local.lr: "),
    "no bool": ("data.download=!!bool x", "data.download: "),
    "a set": ("plugins=!!set {a, b}", "plugins: "),
    "bytes": ("name=!!binary x", "name: "),
    "pairs": ("plugins=!!pairs [a: b]", "plugins: "),
    "an object of Python's": ("name=!!python/object/apply:os.getcwd []", "name: "),
    "a mapping that is none": ("local=!!map x", "local: "),
    "a list that is none": ("trainable=!!seq x", "trainable: "),
    "digits": (f"rounds={DIGITS}", "rounds: "),
    "digits of a float": (f"local.lr={DIGITS}.0", "local.lr: "),
    "digits in base 16": (f"rounds=0x{DIGITS}", "rounds: got a whole number that is too long"),
    "digits for a float": ("local.lr=" + "9" * 290, "local.lr: "),
    "a place of many digits": (f"phases.{DIGITS[:150]}.rounds=1", "phases.999"),
    "a place that is no digit": ("phases.²=1", "phases: "),
    "many parts": ("a." * 3000 + "a=1", "'a.a.a."),
    "a long key": ("a" * 3000 + "=1", "'aaa"),
    "an unknown key that is long": ("a" * 190 + "=1", "'aaa"),
    "no key": ("=1", "'=1': an override is key=value"),
    "an empty part": ("local..lr=1", "local.: unknown key"),
    "a control character in a key": ("lo\0cal=1", "'lo\\x00cal': is no key"),
    "a NUL in the name": (r'name="a\0b"', "name: got 'a\\x00b'"),
    "a NUL in the output": (r'output="a\0b"', "output: got 'a\\x00b'"),
    "a NUL in a path": (r'data.path="a\0b"', "data.path: got "),
    "a line break": (r'output="a\nb"', "output: got 'a\\nb'"),
    "a surrogate in the name": (r'name="\ud800"', "name: got '\\ud800'"),
    "a surrogate in a plugin": (r'plugins=["\ud800"]', "plugins: got '\\ud800'"),
    "a surrogate as a byte": ("output=\udcff", "output: "),
    "a surrogate in a key below": (r'cluster.extra={"\ud800": 1}', "cluster.extra: got '\\ud800'"),
    "more than float32 has": ("local.lr=1e40", "local.lr: got 1e+40; must be 0 or a number that float32 has"),
    "less than float32 has": ("local.weight_decay=1e-60", "local.weight_decay: got 1e-60; must be"),
    "no number": ("server.optimizer.lr=.nan", "server.optimizer.lr: got nan"),
    "threads": ("runtime.threads_per_rank=3000000000", "runtime.threads_per_rank: got 3000000000; should be less"),
    "width": ("model.width=100000000", "model.width: got 100000000; should be less"),
    "layers": ("model={type: mlp, hidden: [900000, 900000]}", "model.hidden: got [900000, 900000]; makes 8100"),
    "many layers": (f"model={{type: mlp, hidden: {[1] * 2000}}}", "model.hidden: got [1, 1, "),
    "too many entries": (f"model={{type: mlp, hidden: {[1] * 20000}}}", "model: got more than 10,000 entries"),
    "a projection": ("model.projection=1000000000000", "model.projection: got 1000000000000"),
    "rounds": ("rounds=1000000000000", "rounds: got 1000000000000"),
    "clients": ("data.partition.clients=1000000000000", "data.partition.clients: got 1000000000000"),
    "a cohort": ("clients_per_round=1000000000000", "clients_per_round: got 1000000000000"),
    "epochs": ("local.epochs=2147483647", "local.epochs: got 2147483647; must be a whole number from 1 to 100000"),
    "steps": ("local.steps={min: 1, max: 10000000000000}", "local.steps.max: got 10000000000000"),
    "a seed": (f"seed={2**63}", f"seed: got {2**63}"),
    "a time": (f"cluster.time={DIGITS}h", "cluster.time: got '999"),
    "a time of centuries": ("cluster.time=99999999d", "cluster.time: got '99999999d'"),
    "memory": ("cluster.mem_gb=1e300", "cluster.mem_gb: got 1e+300"),
    "a deep list": ("plugins=" + "[" * 5000, "plugins: got lists or mappings nested too deep"),
    "a deep mapping": ("cluster.extra=" + "{a: " * 500, "cluster.extra: got lists or mappings nested too deep"),
    "a long text": ("output=" + "a/" * 60_000, "output: got more than 100,000 characters"),
    "a long name": ("name=" + "a" * 50_000, "name: got 'aaa"),
    "a long method": ("filter=" + "a" * 50_000, "filter: got 'aaa"),
    "a long plugin": ("plugins=[" + "a" * 50_000 + "]", "plugins: 'aaa"),
    "a long choice": ("runtime.device=" + "a" * 50_000, "runtime.device: got 'aaa"),
    "a file of a long name": ("a" * 5000 + ".yaml", "aaa"),
    "a folder of long names": ("a/" * 5000 + "c.yaml", "a/a/a/"),
    "a file that is not there, with a =": ("runs/lr=1/config.yaml", "'runs/lr=1/config.yaml': is no file that exists"),
}  # fmt: skip
TYPED["rounds and a decay"] = (
    "local={lr_decay: 0.5, lr: 1.0}",
    "local.lr_decay: got a decay that takes local.lr below",
)
SHAPE = ["data.dataset=synthetic", "data.shape=[100000, 100000, 3]"]

# What a file holds.
FILES = {
    "aliases of aliases": (ALIASES, "got more than 10,000 entries, aliases counted as what they stand for"),
    "an alias of itself": ("plugins: &a [*a]\n", "nested too deep"),
    "a mapping of itself": ("cluster: &a {extra: *a}\n", "nested too deep"),
    "merges of merges": (MERGES, "a: unknown key"),
    "a merge of itself": ("local: &a {<<: *a}\n", ""),
    "a merge of no mapping": ("local: {<<: 5}\n", "not valid YAML"),
    "many layers": (f"model: {{type: mlp, hidden: {[1] * 1_000_000}}}\n", "got more than 100,000 characters"),
    "many keys": ("".join(f"k{number}: 1\n" for number in range(4000)), "got a mapping of more than 2,000 keys"),
    "many wrong phases": ("phases:\n" + "- {rounds: x}\n" * 900, "phases: got "),
    "open brackets": ("[" * 90_000, "nested too deep"),
    "open mappings": ("{a: " * 20_000, "nested too deep"),
    "indentation": ("".join(f"{' ' * depth}a:\n" for depth in range(400)), "nested too deep"),
    "a complex key": ("? {a: b}\n: 1\n", "a key is a name"),
    "two documents": ("a: 1\n---\nb: 2\n", "not valid YAML"),
    "a tag": ("seed: !!timestamp x\n", "not valid YAML"),
    "a tag for all": ("!!set {a, b}\n", "not valid YAML"),
    "a tab": ("a:\n\tb: 1\n", "not valid YAML"),
    "a NUL": ("name: a\0b\n", "not valid YAML"),
    "an escape": ('name: "a\\0b"\n', "got 'a\\x00b'"),
    "an escape in a key": ('"lo\\0cal": 1\n', "got 'lo\\x00cal'"),
    "no UTF-8": (b"name: \xff\xfe\n", "cannot be read as a config"),
    "digits": (f"rounds: {DIGITS}\n", "not valid YAML"),
    "a directive": ("%YAML 9.9\n---\na: 1\n", "not valid YAML"),
    "an unknown anchor": ("a: *b\n", "not valid YAML"),
}  # fmt: skip


def _one_message(said: str) -> str:
    assert said.startswith("config error: "), said[:300]
    assert len(said) < 2000
    assert "Traceback" not in said
    return said.removeprefix("config error: ")


@pytest.mark.parametrize("case", TYPED)
def test_a_typed_absurdity_is_one_short_message(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    word, begins = TYPED[case]
    started = time.process_time()
    more = ["rounds=2000"] if case == "rounds and a decay" else []
    assert fedspec_dist.main.main([word, *more]) == 2
    assert time.process_time() - started < 1
    assert _one_message(capsys.readouterr().err).startswith(begins)


def test_images_that_no_memory_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedspec_dist.main.main(SHAPE) == 2
    assert _one_message(capsys.readouterr().err).startswith("data.shape: got [100000, 100000, 3], of which")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
from fedspec_dist.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("case", ["aliases of aliases", "merges of merges", "an alias of itself", "many layers"])
def test_a_bomb_takes_no_memory(case: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FILES[case][0])
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LIMITED, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 2, ended.stderr[-1000:]
    assert FILES[case][1] in _one_message(ended.stderr)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2  # Python's start and all imports included


def _program(name: str, path: Path, folder: Path) -> int:
    if name == "sweep":
        (folder / "study.yaml").write_text(f"config: {json.dumps(str(path))}\n")
        return sweep.main([str(folder / "study.yaml"), "--dry-run"])
    if name == "sweep file":
        return sweep.main([str(path), "--dry-run"])
    if name == "templates":
        return templates.main(["single_node", str(path)])
    return {"main": fedspec_dist.main.main, "doctor": fedspec_dist.doctor.main, "submit": submit.main}[name](
        [str(path)]
    )


# The other programs read it with the same function; of theirs, a case of each kind.
KINDS = ("aliases of aliases", "open brackets", "many wrong phases", "a tag", "an escape", "no UTF-8", "digits")
OF_PROGRAMS = [("main", case) for case in FILES if case != "a merge of itself"]  # which is harmless
OF_PROGRAMS += list(itertools.product(["doctor", "submit", "sweep", "sweep file", "templates"], KINDS))


@pytest.mark.parametrize(("program", "case"), OF_PROGRAMS)
def test_an_absurd_file_is_one_short_message_of_every_program(
    case: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, says = FILES[case]
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert _program(program, path, tmp_path) == 2
    said = capsys.readouterr().err
    assert len(said) < 2000
    if program != "sweep file":  # whose keys are others
        assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize("case", KINDS)
def test_a_run_folder_with_such_a_config_is_shown_all_the_same(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, _ = FILES[case]
    folder = tmp_path / "run-12345678"
    folder.mkdir()
    (folder / "config.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert status.main([str(folder)]) == 0
    assert "run-12345678" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"axes: {{grid: {{rounds: {list(range(1, 300))}, seed: {list(range(300))}}}}}", "axes: stand for 89700 runs"),
        (f"seeds: {list(range(9000))}\naxes: {{grid: {{rounds: [1, 2, 3]}}}}", "axes: stand for 27000 runs"),
        (
            f"tune: {{over: {{local.lr: {list(range(1, 300))}, rounds: {list(range(1, 300))}}}}}",
            "tune.over: the first grid has 89401 points",
        ),
        (f"methods: {{{', '.join(f'm{n}: {{overrides: [rounds=x]}}' for n in range(300))}}}", "m0: rounds: got 'x'"),
        (f"overrides: [name={'a' * 9000}]", "name: got 'aaa"),
        ('methods: {"\\ud800": {}}', "got '\\ud800'"),
        ('config: "a\\0b"', "got 'a\\x00b'"),
        (f"seeds: {'x' * 9000}", "seeds: got 'xxx"),
    ],
)
def test_an_absurd_sweep_is_one_short_message(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    started = time.process_time()
    assert sweep.main([str(path), "--dry-run"]) == 2
    assert time.process_time() - started < 2
    assert message in _one_message(capsys.readouterr().err)


KEYS = [(key, []) for key in keys_of(DEFAULTS)] + [
    (f"data.{parameter}" if family == "data.dataset" else f"{family}.{parameter}", [f"{family}={name}"])
    for family, row in FAMILIES.items()
    for name in row.table
    for parameter in row.parameters(name)
]


@pytest.mark.parametrize("value", ["null", "[{a: 1}]", "{type: 5}", "{min: 2, max: 1}", DIGITS[:25], "1e-45", ".inf"])
def test_any_key_takes_an_odd_value_or_refuses_it_in_words(value: str) -> None:
    messages = {}
    for key, names in KEYS:
        try:
            config = load(None, [*names, f"{key}={value}"])
        except ConfigError as error:
            messages[key] = str(error)
        else:
            assert len(config.fingerprint()) == 8
            assert config.to_yaml()
    assert messages
    assert max(map(len, messages.values())) < 2000
