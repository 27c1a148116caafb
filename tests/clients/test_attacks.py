"""Malicious clients: who they are, what they make of labels and updates, and what a run says of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedspec_dist.clients.attacks import Attack, Gaussian, LabelFlip, Scale, SignFlip, attackers
from fedspec_dist.config import load
from fedspec_dist.config.methods import ATTACKS, FAMILIES
from fedspec_dist.config.own_methods import FORMS
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.local import NonFiniteUpdateError
from tests.end_to_end.cli import metrics_of, run, run_folder
from tests.rounds.jobs import run_job, tiny

HALF = "clients.attack={type: %s, fraction: 0.5}"


def test_who_is_malicious_depends_on_the_seed_alone_and_grows_with_the_fraction() -> None:
    population = [1, 3, 4, 6, 7, 8, 9, 11, 12, 20]
    some = attackers(0, 0.3, population)
    assert len(some) == 3
    assert list(some) == sorted(set(some) & set(population))
    assert attackers(0, 0.3, population) == some
    assert set(some) < set(attackers(0, 0.7, population))
    assert len({attackers(seed, 0.3, population) for seed in range(20)}) > 10
    assert len(attackers(0, 0.29, range(100))) == 29, "of the decimal number"
    assert attackers(0, 0.09, population) == ()


def test_attacks_by_hand() -> None:
    labels, update = torch.tensor([0, 1, 9]), torch.tensor([1.0, -2.0])

    def spoiled(attack: Attack, seed: int = 0) -> list[float]:
        sent = update.clone()
        attack.spoil(sent, seed)
        return sent.tolist()

    assert LabelFlip().labels(labels, 10).tolist() == [9, 8, 0]
    assert spoiled(LabelFlip()) == spoiled(Attack()) == [1, -2]
    assert spoiled(SignFlip(factor=3.0)) == [-3, 6]
    assert spoiled(Scale(factor=10.0)) == [10, -20]
    assert all(
        torch.equal(attack.labels(labels, 10), labels)
        for attack in (Attack(), ATTACKS["sign_flip"].build(), ATTACKS["scale"].build(), ATTACKS["gaussian"].build())
    )
    assert spoiled(Gaussian(2.0)) == [2 * value for value in spoiled(Gaussian(1.0))]
    assert spoiled(ATTACKS["gaussian"].build(), seed=1) != spoiled(ATTACKS["gaussian"].build(), seed=0)
    long = torch.zeros(20000)
    Gaussian(3.0).spoil(long, 0)
    assert long.std().item() == pytest.approx(3.0, rel=0.03)


def test_only_training_labels_of_malicious_clients_are_flipped() -> None:
    honest, attacked = (load_federation(tiny(given), prepares=True) for given in ([], [HALF % "label_flip"]))
    assert honest.attackers == ()
    assert len(attacked.attackers) == 3
    before, after = honest.dataset.train.targets, attacked.dataset.train.targets
    assert torch.equal(honest.dataset.test.targets, attacked.dataset.test.targets)
    for client, samples in enumerate(attacked.clients):
        assert np.array_equal(samples, honest.clients[client])
        expected = 2 - before[samples] if client in attacked.attackers else before[samples]
        assert torch.equal(after[samples], expected)


def test_a_sign_flipped_update_is_what_honest_training_gives_the_other_way(tmp_path: Path) -> None:
    """All clients but one are malicious, and the round is of one of them."""
    settings = ["rounds=1", "clients_per_round=1", "seed=3"]
    honest = run_job(tiny(settings), tmp_path / "honest")
    attack = "clients.attack={type: sign_flip, fraction: 0.99, factor: 2.0}"
    attacked = run_job(tiny([*settings, attack]), tmp_path / "attacked")
    assert attacked.records[0]["attackers"] == attacked.records[0]["cohort"] == honest.records[0]["cohort"]
    assert "attackers" not in honest.records[0]
    start = run_job(tiny([*settings, "local.lr=1e-30"]), tmp_path / "start").model
    for name, initial in start.items():
        update = honest.model[name] - initial
        torch.testing.assert_close(attacked.model[name], initial - 2 * update, rtol=1e-4, atol=1e-6)


def test_krum_passes_over_the_one_that_scales(tmp_path: Path) -> None:
    attack = "clients.attack={type: scale, fraction: 0.17, factor: 1e6}"
    settings = ["rounds=1", "clients_per_round=6", attack]
    robust = run_job(tiny([*settings, "server.aggregator=krum"]), tmp_path / "krum")
    (record,) = robust.records
    assert len(record["attackers"]) == 1
    assert record["krum/client"] not in record["attackers"]
    mean = run_job(tiny(settings), tmp_path / "fedavg")
    assert all(tensor.norm() < 100 for tensor in robust.model.values())
    assert any(tensor.norm() > 100 for tensor in mean.model.values())


def test_an_attack_that_leaves_the_numbers_is_named_like_any_other_update(tmp_path: Path) -> None:
    config = tiny(["clients.attack={type: gaussian, fraction: 0.99, std: 3e38}", "rounds=1"])
    with pytest.raises(NonFiniteUpdateError, match=r"^client \d returned a non-finite update in round 1"):
        run_job(config, tmp_path)


def test_less_than_one_malicious_client_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^clients\.attack\.fraction: got 0\.1, which of 6 clients .*is less than one"
    ):
        load_federation(tiny(["clients.attack={type: scale, fraction: 0.1}"]), prepares=True)


def test_the_name_of_a_run_knows_attacks_and_transforms_only_where_there_are_any() -> None:
    default = load(None).fingerprint()
    same = (["clients.attack=none"], ["server.transforms=[]"])
    others = (
        ["clients.attack=scale"],
        ["clients.attack=sign_flip"],
        ["clients.attack={type: scale, fraction: 0.4}"],
        ["server.transforms=[clip]"],
        ["server.transforms=[clip, fedgh]"],
        ["server.transforms=[fedgh, clip]"],
        ["server.transforms=[{type: clip, norm: 2.0}]"],
    )
    assert {load(None, given).fingerprint() for given in same} == {default}
    assert len({default, *(load(None, given).fingerprint() for given in others)}) == 1 + len(others)
    phased = ["phases=[{rounds: 1}, {rounds: 2, server: {transforms: [fedgh]}}]"]
    config = load(None, phased)
    assert [[made.type for made in phase.server.transforms] for phase in config.schedule()] == [[], ["fedgh"]]
    assert config.fingerprint() != load(None, ["phases=[{rounds: 1}, {rounds: 2}]"]).fingerprint()


def test_every_family_has_a_form_for_methods_of_plugins() -> None:
    assert FORMS.keys() == FAMILIES.keys() | {"statistics"}


@pytest.mark.slow
def test_a_run_writes_down_who_is_malicious(tmp_path: Path) -> None:
    settings = ["rounds=2", "local.epochs=1", "clients.attack=sign_flip", "server.transforms=fedgh"]
    run(tmp_path, *settings, ranks=2).expect(0)
    folder = run_folder(tmp_path)
    malicious = json.loads((folder / "environment.json").read_text())["starts"][-1]["attackers"]
    assert len(malicious) == 4
    for record in metrics_of(tmp_path):
        assert record["attackers"] == [client for client in record["cohort"] if client in malicious]
