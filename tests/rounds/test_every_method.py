"""Every local method in whole runs: the same bits at any number of ranks, and after a stop at another number."""

from __future__ import annotations

import json
import math
import re
import shutil
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspec_dist.config import Config, methods
from fedspec_dist.data.images.augment import Augmentation
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.local import NonFiniteUpdateError
from fedspec_dist.rounds.making import build_model
from fedspec_dist.rounds.sampling import client_work, reporting, sample_cohort, workload
from tests.distributed.harness import run_ranks
from tests.rounds.jobs import Finished, run_job, tiny

ROUNDS = 4
SKIP = "runtime.on_nonfinite=skip"
ATTACKED = "clients.attack={{type: {}, fraction: 0.5}}"
ATTACKS = [name for name in methods.ATTACKS if name != "none"]
# A method with what makes it differ from FedAvg soon, if its defaults do not; fednova has to have its aggregator.
SETTINGS: dict[str, list[str]] = {
    **{name: [f"local.algorithm={name}"] for name in methods.LOCAL_ALGORITHMS},
    "scaffold full gradient": ["local.algorithm={type: scaffold, option: 1}", "filter={type: rfft, ratio: 0.1}"],
    "fednova": ["local.algorithm={type: fednova, mu: 0.1}", "server.aggregator=fednova"],
    "fedsam adaptive": ["local.algorithm={type: fedsam, adaptive: true}"],
    "fedsam filtered ascent": [
        "local.algorithm={type: fedsam, filter_ascent: true}",
        "filter={type: random, ratio: 0.2}",
    ],
    "moon with a projection head": ["local.algorithm=moon", "model.projection=4"],
    "random filter": ["filter={type: random, ratio: 0.3}"],
    "fisher_diagonal": ["server.aggregator=fisher_diagonal"],
    "fedlaw": ["server.weights={type: fedlaw, epochs: 2, proxy_fraction: 0.2}"],
    **{
        f"{aggregator} under {attack}": [f"server.aggregator={aggregator}", ATTACKED.format(attack)]
        for attack, aggregator in zip(ATTACKS, cycle(["krum", "multi_krum", "geometric_median"]), strict=False)
    },
    "clip and noise": ["server.transforms=[{type: clip, norm: 0.05}, {type: noise, multiplier: 0.5}]"],
    "fedgh before fednova": [
        "server.transforms=[fedgh]",
        "local.algorithm=fednova",
        "server.aggregator=fednova",
        "local.epochs={min: 1, max: 3}",
    ],
    "centered clipping of a noisy chain under attack": [
        "server.transforms=[{type: clip, norm: 0.05}, fedgh, {type: noise, multiplier: 0.1}]",
        "server.aggregator={type: centered_clipping, radius: 0.05}",
        ATTACKED.format("gaussian"),
    ],
    "all at once": [
        "local.algorithm=scaffold",
        "local.momentum=0.5",
        "server.aggregator=fedgh",
        "server.weights=fedawa",
        "server.optimizer=yogi",
        "server.filter={type: rfft, ratio: 0.1}",
        "sampling=bernoulli",
        "dropout=0.2",
        "local.epochs={min: 1, max: 3}",
        "data.augment=[flip]",
    ],
}


def _runs(collectives: Collectives, folder: str, until: int | None) -> dict[str, Finished]:
    return {
        name: run_job(tiny([*overrides, f"rounds={ROUNDS}"]), Path(folder) / name, collectives, until)
        for name, overrides in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def undisturbed(alone: Path) -> dict[str, Finished]:
    (runs,) = run_ranks(_runs, 1, alone, str(alone), None, timeout_s=300)
    return dict(runs)


def _require_same(found: dict[str, Finished], expected: dict[str, Finished], since: int, where: str) -> None:
    for name, run in expected.items():
        for key, tensor in run.model.items():
            assert torch.equal(found[name].model[key], tensor), f"{name}: {key} {where}"
        assert found[name].results() == run.results()[since:], f"{name} {where}"


def test_every_method_does_something_of_its_own(undisturbed: dict[str, Finished]) -> None:
    weights: dict[str, Any] = {name: run.model["conv2.weight"] for name, run in undisturbed.items()}
    for name, weight in weights.items():
        assert weight.isfinite().all(), name
        twins = [other for other, theirs in weights.items() if other != name and torch.equal(weight, theirs)]
        assert not twins, f"{name} is the same as {twins}"


@pytest.mark.parametrize("family", ["local.algorithm", "server.transforms", "clients.attack"])
def test_a_family_that_acts_where_clients_train_or_in_order_is_all_here(family: str) -> None:
    given = " ".join(word for overrides in SETTINGS.values() for word in overrides if word.startswith(family))
    assert [name for name in methods.FAMILIES[family].table if name not in (*re.findall(r"\w+", given), "none")] == []


@pytest.mark.parametrize("name", [*SETTINGS, "batched"])
def test_same_bits_with_the_checks_of_debug(name: str, tmp_path: Path) -> None:
    overrides = [*SETTINGS.get(name, ["runtime.executor=batched"]), "rounds=1"]
    usual = run_job(tiny(overrides), tmp_path / "usual")
    with torch.autograd.set_detect_anomaly(True):
        checked = run_job(tiny(overrides), tmp_path / "checked")
    assert checked.results() == usual.results()
    assert all(torch.equal(checked.model[key], tensor) for key, tensor in usual.model.items())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_same_bits_on_any_number_of_ranks(num_ranks: int, undisturbed: dict[str, Finished], tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(_runs, num_ranks, tmp_path, str(tmp_path), None, timeout_s=300)):
        _require_same(found, undisturbed, 0, f"on rank {rank} of {num_ranks}")


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_same_bits_after_a_stop_at_another_number_of_ranks(
    before: int, after: int, undisturbed: dict[str, Finished], tmp_path: Path
) -> None:
    run_ranks(_runs, before, tmp_path, str(tmp_path), 3, timeout_s=300)
    for rank, found in enumerate(run_ranks(_runs, after, tmp_path, str(tmp_path), None, timeout_s=300)):
        _require_same(found, undisturbed, 3, f"on rank {rank}, resumed")


def test_same_bits_after_a_kill(undisturbed: dict[str, Finished], alone: Path, tmp_path: Path) -> None:
    """What was done after an older checkpoint is lost, with all that clients and server kept of it, and done again."""
    for name in undisturbed:
        shutil.copytree(alone / name, tmp_path / name)
        checkpoints = sorted((tmp_path / name / "checkpoints").glob("round-*"))
        assert [path.name for path in checkpoints] == ["round-000002", "round-000004"]
        shutil.rmtree(checkpoints[-1])
    for rank, found in enumerate(run_ranks(_runs, 2, tmp_path, str(tmp_path), None, timeout_s=300)):
        _require_same(found, undisturbed, 2, f"on rank {rank}, done again")


def _with_an_empty_round() -> list[str]:
    """Settings of a run in which somebody reports to rounds 1 and 3, and nobody to round 2."""
    settings = ["dropout=0.7", "rounds=3", "checkpoint.every=1", "checkpoint.keep=3"]

    def reports(config: Config) -> list[int]:
        cohorts = [sample_cohort(config, index, range(6)) for index in range(3)]
        return [len(reporting(config, index, cohort)) for index, cohort in enumerate(cohorts)]

    seeds = (seed for seed in range(100) if [n > 0 for n in reports(tiny([f"seed={seed}", *settings]))] == [1, 0, 1])
    return [f"seed={next(seeds)}", *settings]


# Whatever remembers anything from round to round.
REMEMBERING = {
    "centered clipping": ["server.aggregator={type: centered_clipping, radius: 0.05}"],
    **{
        name: SETTINGS[name]
        for name, entry in methods.LOCAL_ALGORITHMS.items()
        if entry.build().own or entry.build().server
    },
    "weights and optimizer": ["server.weights=fedawa", "server.optimizer=yogi"],
}


def _empty_rounds(collectives: Collectives, folder: str) -> dict[str, Finished]:
    once = _with_an_empty_round()
    cases = {name: [*overrides, *once] for name, overrides in REMEMBERING.items()}
    cases["nobody ever"] = ["local.algorithm=scaffold", "dropout=0.9999999", "rounds=2", "checkpoint.every=1"]
    return {name: run_job(tiny(case), Path(folder) / name, collectives) for name, case in cases.items()}


def test_a_round_that_nobody_reports_to_changes_nothing_on_any_number_of_ranks(tmp_path: Path) -> None:
    (expected,) = run_ranks(_empty_rounds, 1, tmp_path, str(tmp_path / "1"), timeout_s=300)
    for found in run_ranks(_empty_rounds, 2, tmp_path, str(tmp_path / "2"), timeout_s=300):
        _require_same(found, expected, 0, "on two ranks")
    for name, run in expected.items():
        sampled = [len(record["cohort"]) + record["clients_dropped"] for record in run.records]
        assert sampled == [3] * len(run.records), name
        empty = [record for record in run.records if not record["cohort"]]
        assert [record["round"] for record in empty] == ([1, 2] if name == "nobody ever" else [2]), name
        assert all(record["train_loss"] is None for record in empty), name
        for ranks in ("1", "2"):
            saved = sorted((tmp_path / ranks / name / "checkpoints").glob("round-*/state.json"))
            before, after, *later = (json.loads(path.read_text())["files"] for path in saved)
            assert before == after, f"{name}: the model, or what server or clients keep"
            assert all(after != other for other in later), name
    initial = build_model(tiny(), load_federation(tiny(), prepares=True).dataset).state_dict()
    assert all(torch.equal(expected["nobody ever"].model[key], tensor) for key, tensor in initial.items())


@pytest.mark.parametrize(
    "method",
    [
        ["local.algorithm={type: scaffold, option: 1}"],
        ["server.aggregator=fisher_diagonal"],
        ["server.aggregator={type: fipa, rank: 3}"],
        ["local.algorithm={type: scaffold, option: 1}", "server.aggregator=fisher_diagonal"],
    ],
    ids=str,
)
def test_what_a_client_sends_besides_its_update_is_checked_too(method: list[str], tmp_path: Path) -> None:
    """One sample that is not a number, which the client's single batch does not contain."""
    settings = [*method, "local.steps=1", "rounds=1", "clients_per_round=6"]
    config = tiny(settings)
    federation = load_federation(config, prepares=True)
    samples, counts = federation.clients[2], federation.class_counts[2]
    load = workload(config.seed, config.local, 0, 2, len(samples))
    seen = client_work(config.seed, 0, 2, samples, counts, load, Augmentation(), torch.device("cpu")).order
    spoil = {int(samples[~np.isin(samples, seen.numpy())][0]): float("nan")}
    with pytest.raises(NonFiniteUpdateError, match=r"^client 2 returned a non-finite update in round 1 \(rank 0\)"):
        run_job(config, tmp_path / "raise", spoil=spoil)
    finished = run_job(tiny([*settings, SKIP]), tmp_path / "skip", spoil=spoil)
    (record,) = finished.records
    assert record["clients_skipped"] == 1
    assert all(tensor.isfinite().all() for tensor in finished.model.values())
    assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
