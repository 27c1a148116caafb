"""Whatever draws random numbers, from whichever generator: the same bits on any rank, after any stop, or an error."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspec_dist.config import Config
from fedspec_dist.config.methods import FAMILIES
from fedspec_dist.core.draws import keyed
from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.models.network import evaluating
from fedspec_dist.rounds.divergence import RanksDisagreeError
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.making import build_model
from tests.distributed.harness import run_ranks
from tests.rounds.jobs import Finished, run_job, tiny

PLUGIN = "plugins=[tests.rounds.random_methods]"
MODEL = "model={type: random_plugin}"
NOISY = "model={type: random_plugin, noise: 0.1}"
DATA = "data={dataset: random_plugin, shape: [1, 8, 8], num_classes: 3, num_train: 90, num_test: 30}"
SETTINGS: dict[str, list[str]] = {
    "data.dataset": [DATA],
    "data.partition": ["data.partition={type: random_plugin, clients: 6}"],
    "model": [MODEL],
    "filter": ["filter=random_plugin"],
    "local.algorithm": ["local.algorithm=random_plugin"],
    "server.aggregator": ["server.aggregator=random_plugin"],
    "server.weights": ["server.weights=random_plugin"],
    "server.optimizer": ["server.optimizer=random_plugin"],
    "server.filter": ["server.filter=random_plugin"],
    "server.transforms": ["server.transforms=random_plugin"],
    "clients.attack": ["clients.attack={type: random_plugin, fraction: 0.5}"],
    # A model with dropout where it is differentiated in other ways than by training.
    "fipa": [MODEL, "server.aggregator={type: fipa, rank: 3}"],
    "fipa, matrix-free": [
        MODEL,
        "server.aggregator={type: fipa, rank: 1, oversampling: 0}",
        "runtime.sketch_memory_mb=0",
    ],
    "fisher_diagonal": [MODEL, "server.aggregator=fisher_diagonal"],
    "fedlaw": [MODEL, "server.weights={type: fedlaw, epochs: 2, proxy_fraction: 0.2}"],
    "moon": [MODEL, "local.algorithm=moon"],
    "scaffold full gradient": [MODEL, "local.algorithm={type: scaffold, option: 1}"],
    # A model that draws in eval mode as well.
    "noisy fipa": [NOISY, "server.aggregator={type: fipa, rank: 3}"],
    "noisy fedlaw": [NOISY, "server.weights={type: fedlaw, epochs: 2, proxy_fraction: 0.2}"],
    "gathered": [
        MODEL,
        "runtime.aggregation=gather",
        "server.aggregator=random_plugin",
        "server.optimizer=random_plugin",
    ],
}


# What is made again at a resume, or goes on from what it drew before.
RESUMED = ["data.partition", "model", "filter", "local.algorithm", "server.weights", "server.optimizer"]
RESUMED += ["server.transforms", "clients.attack"]


def _config(name: str) -> Config:
    return tiny([PLUGIN, *SETTINGS[name], "rounds=2", "checkpoint.every=1"])


def _runs(collectives: Collectives, folder: str, until: int | None, names: list[str]) -> dict[str, Finished]:
    # As different from rank to rank and from start to start as they are in life.
    torch.seed()
    np.random.seed()
    random.seed()
    found = {}
    for name in names:
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        found[name] = run_job(_config(name), Path(folder) / name, collectives, until)
        assert torch.equal(torch.get_rng_state(), before[0]), f"{name} leaves a trace in torch's generator"
        assert np.array_equal(np.random.get_state()[1], before[1]), f"{name} leaves a trace in numpy's"
        assert random.getstate() == before[2], f"{name} leaves a trace in python's"
    return found


@pytest.fixture(autouse=True)
def _plugin_is_gone_afterwards() -> Iterator[None]:
    """From this process: other tests walk through all methods that there are."""
    yield
    sys.modules.pop("tests.rounds.random_methods", None)
    for family in FAMILIES.values():
        for name in ("random_plugin", "unkeyed"):
            family.table.pop(name, None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    folder = tmp_path_factory.mktemp("alone")
    (runs,) = run_ranks(_runs, 1, folder, str(folder), None, list(SETTINGS), timeout_s=120)
    return dict(runs)


def _require_same(ranks: list[dict[str, Finished]], expected: dict[str, Finished], since: int) -> None:
    for name in ranks[0]:
        for found in ranks:
            assert all(torch.equal(found[name].model[key], t) for key, t in expected[name].model.items()), name
        assert ranks[0][name].results() == expected[name].results()[since:], name


def test_same_bits_on_two_ranks(alone: dict[str, Finished], tmp_path: Path) -> None:
    _require_same(run_ranks(_runs, 2, tmp_path, str(tmp_path), None, list(SETTINGS), timeout_s=120), alone, 0)


def test_same_bits_after_a_stop_at_another_number_of_ranks(alone: dict[str, Finished], tmp_path: Path) -> None:
    run_ranks(_runs, 1, tmp_path, str(tmp_path), 1, RESUMED, timeout_s=120)
    _require_same(run_ranks(_runs, 2, tmp_path, str(tmp_path), None, RESUMED, timeout_s=120), alone, 1)


def test_clients_and_rounds_draw_differently(tmp_path: Path) -> None:
    draws = []
    for key in [(0, 1), (0, 2), (1, 1), (0, 1)]:
        with keyed(torch.device("cpu"), 7, "client", *key):
            draws.append((float(torch.rand(1)), np.random.rand(), random.random()))
    assert draws[3] == draws[0]
    assert len(set(draws)) == 3


def _refused(collectives: Collectives, folder: str, setting: str) -> str:
    try:
        run_job(tiny([PLUGIN, setting, "rounds=2", "checkpoint.every=1"]), Path(folder), collectives)
    except RanksDisagreeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("server.aggregator=unkeyed", "weights, coefficients"),
        ("data.partition={type: unkeyed, clients: 6}", "partition"),
    ],
)
def test_ranks_that_came_to_different_results_say_so_before_anything_is_kept(
    setting: str, what: str, tmp_path: Path
) -> None:
    said = run_ranks(_refused, 2, tmp_path, str(tmp_path / "run"), setting)
    assert said[0] == said[1]
    assert said[0].startswith("after round 1 not all ranks have the same")
    assert what in said[0]
    assert not list((tmp_path / "run").glob("checkpoints/round-*"))
    assert _refused(SingleProcess(), str(tmp_path / "alone"), setting) == "", "one rank cannot disagree"


def test_a_part_of_a_model_that_is_kept_in_eval_mode_stays_so(tmp_path: Path) -> None:
    """Whether and when a model is evaluated has no part in how it trains."""
    config = tiny([PLUGIN, MODEL])
    module = build_model(config, load_federation(config, prepares=True).dataset)
    module.hidden.eval()
    with evaluating(module):
        assert not any(part.training for part in module.modules())
    assert module.training
    assert module.dropout.training
    assert not module.hidden.training


def test_how_often_is_evaluated_changes_nothing(tmp_path: Path) -> None:
    def model(every: int) -> dict[str, Any]:
        return run_job(tiny([PLUGIN, NOISY, "rounds=2", f"eval.every={every}"]), tmp_path / str(every)).model

    often, once = model(1), model(2)
    assert all(torch.equal(often[key], tensor) for key, tensor in once.items())
