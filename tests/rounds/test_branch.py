"""Runs that start from another: the bits of the one long run, and one sentence where that cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedspec_dist.config import ConfigError, load
from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.main import main
from tests.distributed.harness import run_ranks
from tests.rounds.jobs import Finished, run_job, tiny

# What goes on after two rounds of FedAvg.
AFTER = {
    "fipa": "server: {aggregator: {type: fipa, rank: 3}}",
    "scaffold, adam": "local: {algorithm: scaffold, lr_decay: 0.9}, server: {optimizer: adam}",
    "the head alone": "trainable: ['fc.*'], local: {lr: 0.2}",
}
# What remembers: of the server, of clients, of the weighting.
REMEMBERING = {
    "scaffold, adam": ["local.algorithm=scaffold", "server.optimizer=adam"],
    "fedawa, momentum": ["server.weights=fedawa", "server.optimizer=momentum"],
    "fipa": ["server.aggregator={type: fipa, rank: 3}"],
    "local norms": ["model={type: cnn, width: 2, norm: batch, buffers: local}"],
}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _two_phases(collectives: Collectives, path: Path, after: str) -> None:
    whole = run_job(tiny([f"phases=[{{rounds: 2}}, {{rounds: 2, {after}}}]"]), path / "whole", collectives)
    run_job(tiny(["rounds=2"]), path / "first", collectives)
    single = f"phases=[{{rounds: 2, {after}}}]"
    config = tiny([single, f"init={{run: {path}/first, round: 2}}"])
    stopped = run_job(config, path / "branch", collectives, rounds=3)
    assert [record["round"] for record in stopped.records] == [3]
    branch = run_job(config, path / "branch", collectives)
    assert [record["round"] for record in branch.records] == [4]
    assert branch.records[0]["cohort"] == whole.records[-1]["cohort"]
    assert branch.records[0]["lr"] == whole.records[-1]["lr"]
    assert same(whole.model, branch.model), after


def _carried_on(collectives: Collectives, path: Path, settings: list[str]) -> Finished:
    whole = run_job(tiny([*settings, "rounds=4"]), path / "whole", collectives)
    run_job(tiny([*settings, "rounds=1"]), path / "first", collectives)
    config = tiny([*settings, "rounds=3", f"init={{run: {path}/first}}"])
    stopped = run_job(config, path / "more", collectives, rounds=2)
    more = run_job(config, path / "more", collectives)
    assert same(whole.model, more.model), settings
    assert stopped.results() + more.results() == whole.results()[1:], settings
    return more


def _all(collectives: Collectives, folder: str) -> dict[str, dict[str, Tensor]]:
    for number, after in enumerate(AFTER.values()):
        _two_phases(collectives, Path(folder) / f"after-{number}", after)
    given = enumerate(REMEMBERING.items())
    return {name: _carried_on(collectives, Path(folder) / str(n), settings).model for n, (name, settings) in given}


def test_branches_have_the_bits_of_one_long_run(tmp_path: Path) -> None:
    """Of a config of two phases, with other methods; of a longer one, with the same. All are stopped once, too."""
    _all(SingleProcess(), str(tmp_path))


@pytest.mark.slow
def test_branches_have_the_same_bits_at_any_number_of_ranks(tmp_path: Path) -> None:
    expected = _all(SingleProcess(), str(tmp_path / "1"))
    for num_ranks in (2, 3):
        for found in run_ranks(_all, num_ranks, tmp_path, str(tmp_path / str(num_ranks)), timeout_s=180):
            assert all(same(found[name], expected[name]) for name in expected), num_ranks


def _drawn_when_made(collectives: Collectives, folder: str) -> bool:
    plugin, second = "plugins=[tests.rounds.random_methods]", "server: {filter: random_plugin}"
    phases = f"phases=[{{rounds: 1}}, {{rounds: 3, {second}}}]"
    whole = run_job(tiny([plugin, phases]), Path(folder) / "whole", collectives)
    run_job(tiny(["rounds=1"]), Path(folder) / "first", collectives)
    # The second phase in three runs, each of which goes on with the one before.
    for name, source in ("1", "first"), ("2", "1"), ("3", "2"):
        config = tiny([plugin, f"phases=[{{rounds: 1, {second}}}]", f"init={{run: {folder}/{source}}}"])
        last = run_job(config, Path(folder) / name, collectives)
    return same(whole.model, last.model)


def test_what_a_method_draws_when_it_is_made_is_drawn_alike_in_a_branch(tmp_path: Path) -> None:
    # In a process of its own: other tests walk through all methods that there are.
    assert run_ranks(_drawn_when_made, 1, tmp_path, str(tmp_path)) == [True]


def test_another_method_starts_without_memories(tmp_path: Path) -> None:
    run_job(tiny(["rounds=2", "local.algorithm=scaffold"]), tmp_path / "first")
    settings = ["rounds=1", f"init={{run: {tmp_path}/first}}", "local.algorithm={type: scaffold, option: 1}"]
    plain = run_job(tiny([*settings[:2], "local.algorithm=fedavg"]), tmp_path / "plain")
    run_job(tiny(settings), tmp_path / "branch")
    first = run_job(tiny([*settings[:2], "local.algorithm={type: scaffold, option: 1}", "name=b"]), tmp_path / "b")
    # The first round of SCAFFOLD, with all controls zero, is FedAvg's.
    assert same(plain.model, first.model)


def test_weights_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = run_job(tiny(["rounds=1"]), tmp_path / "first").model
    save_file(before, tmp_path / "w.safetensors")
    one = run_job(tiny(["rounds=1", f"init={{weights: {tmp_path}/w.safetensors}}"]), tmp_path / "one")
    assert one.records[0]["round"] == 1
    assert not same(one.model, run_job(tiny(["rounds=1"]), tmp_path / "other").model)
    partly = {name: tensor for name, tensor in before.items() if not name.startswith("fc")} | {"extra": torch.ones(2)}
    save_file(partly, tmp_path / "part.safetensors")
    config = tiny(["rounds=1", f"init={{weights: {tmp_path}/part.safetensors}}"])
    with pytest.raises(ValueError, match=r"^init\.weights: .*fc\.weight is missing; .*; extra is left"):
        run_job(config, tmp_path / "x")
    run_job(tiny(["rounds=1", f"init={{weights: {tmp_path}/part.safetensors, strict: false}}"]), tmp_path / "y")
    assert "drawn anew: fc.weight, fc.bias; left over in the file: extra" in caplog.text
    save_file({"fc.bias": torch.ones(4)}, tmp_path / "other.safetensors")
    config = tiny(["rounds=1", f"init={{weights: {tmp_path}/other.safetensors, strict: false}}"])
    with pytest.raises(
        ValueError, match=r"^init\.weights: .*fc\.bias has shape \[4\], not \[3\]; allowed: the weights"
    ):
        run_job(config, tmp_path / "z")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["init={run: nowhere}"], r"^init\.run: nowhere has no checkpoints"),
        (["init={run: RUN, round: 7}"], r"^init\.round: got 7, but the checkpoints in .* are of the rounds 2"),
        (["init={run: RUN}", "model={type: cnn, width: 4}"], r"^init\.run: .* does not fit: conv1\.weight has shape"),
        (["init={run: RUN}", "model=mlp"], r"^init\.run: .* is missing; .*and \d+ more"),
        (
            ["init={run: RUN}", "data.num_test=20"],
            r"^init\.run: in .*round-000002 data\.dataset was another synthetic; .*init\.weights: .*tensors$",
        ),
        (
            ["init={run: RUN}", "task={type: language}"],
            r"^init\.run: in .*round-000002 task was classification, here it is language; allowed",
        ),
        (["init={weights: nowhere.safetensors}"], r"^init\.weights: cannot read nowhere\.safetensors"),
        (["init={run: RUN, weights: x}"], r"^init: .*give one of run and weights"),
        (["init={}"], r"^init: .*give one of run and weights"),
    ],
)
def test_what_cannot_be_started_from_is_told(settings: Sequence[str], message: str, tmp_path: Path) -> None:
    run_job(tiny(["rounds=2"]), tmp_path / "first")
    with pytest.raises((ValueError, ConfigError), match=message):
        run_job(tiny([text.replace("RUN", str(tmp_path / "first")) for text in settings]), tmp_path / "branch")


def test_a_damaged_checkpoint_is_no_start(tmp_path: Path) -> None:
    run_job(tiny(["rounds=2"]), tmp_path / "first")
    (tmp_path / "first" / "checkpoints" / "round-000002" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"^init\.run: .*round-000002 cannot be read: model\.safetensors is damaged"):
        run_job(tiny([f"init={{run: {tmp_path}/first}}"]), tmp_path / "branch")


def test_where_the_source_lies_does_not_name_the_run() -> None:
    there, here, other = (
        load(None, [f"init={{run: {run}, round: 3}}"]).fingerprint() for run in ("/a/x-1", "b/x-1", "/a/y-1")
    )
    assert there == here != other
    assert there != load(None, ["init={run: /a/x-1, round: 4}"]).fingerprint()


QUICK = ["data.partition.clients=4", "clients_per_round=2", "local.epochs=1", "model={type: mlp, hidden: [4]}"]


@pytest.mark.parametrize("phases", [[], ["phases=[{rounds: 1}, {rounds: 1, local: {lr: 0.2}}]"]], ids=["one", "two"])
def test_a_finished_run_is_carried_on(phases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [] if phases else ["rounds=2"]
    assert main([*QUICK, *rounds, *phases, f"output={tmp_path}", "--debug"]) == 0
    (first,) = tmp_path.glob("digits-specgrad-*")
    assert main(["--continue-from", str(first), "rounds=3", "--debug"]) == 0
    (second,) = (path for path in tmp_path.glob("digits-specgrad-*") if path != first)
    records = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == [3, 4, 5]
    summary = json.loads((second / "summary.json").read_text())
    assert [phase["rounds"] for phase in summary["phases"]] == [3]
    assert summary["phases"][0]["last"] == records[-1]["test_accuracy"]
    longer = ["phases=[{rounds: 1}, {rounds: 4, local: {lr: 0.2}}]"] if phases else ["rounds=5"]
    assert main([*QUICK, *longer, f"output={tmp_path}/long", "--debug"]) == 0
    (whole,) = (tmp_path / "long").glob("*")
    assert (whole / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert main(["--continue-from", str(tmp_path / "none")]) == 2
    assert "has no config.yaml" in capsys.readouterr().err


PLUGIN = """
from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.config.methods import register

class Bent(LocalAlgorithm):
    def correct(self, vectors):
        vectors.gradient.mul_({factor})

register("local.algorithm", "bent", "bent:Bent")
"""


def test_an_edited_plugin_is_not_carried_on_unless_that_is_accepted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def started(factor: float, *arguments: str) -> int:
        (tmp_path / "bent.py").write_text(PLUGIN.format(factor=factor))
        command = [sys.executable, "-m", "fedspec_dist.main", *arguments, "--debug"]
        paths = os.pathsep.join([str(tmp_path), os.getcwd()])
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=False).returncode

    assert started(0.5, *QUICK, "rounds=1", "plugins=[bent]", "local.algorithm=bent", f"output={tmp_path}/runs") == 0
    (first,) = (tmp_path / "runs").glob("*")
    more = ["--continue-from", str(first), "rounds=1"]
    assert started(0.7, *more) != 0
    assert "the plugin bent (then" in capfd.readouterr().err
    assert started(0.7, *more, "--accept-changes") == 0
    (second,) = (path for path in (tmp_path / "runs").glob("*") if path != first)
    assert "bent" in str(json.loads((second / "environment.json").read_text()))
    assert started(0.5, *more, "name=same") == 0
