"""Evaluation in blocks: the same bits on any number of ranks, the right numbers for any block size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedspec_dist.core.batch import Batch
from fedspec_dist.data.dataset import Examples
from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.main import main
from fedspec_dist.rounds.evaluation import evaluate, over_clients
from fedspec_dist.tasks.classification import Classification
from tests.distributed.harness import run_ranks

NUM_SAMPLES = 47


def _problem() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Dropout(0.5))
    with torch.no_grad():
        module[1].weight.copy_(torch.randn(5, 12, generator=generator))
        module[1].bias.zero_()
    images = torch.randn(NUM_SAMPLES, 3, 2, 2, generator=generator)
    return module, images, torch.randint(5, (NUM_SAMPLES,), generator=generator)


def _scores(collectives: Collectives, block_sizes: list[int]) -> list[dict[str, float]]:
    module, images, labels = _problem()
    return [evaluate(module, Classification(), Examples((images,), labels), size, collectives) for size in block_sizes]


@pytest.mark.parametrize("block_size", [1, 4, 46, 47, 1000])
def test_the_mean_over_the_test_set_in_evaluation_mode(block_size: int) -> None:
    module, images, labels = _problem()
    scores = evaluate(module, Classification(), Examples((images,), labels), block_size, SingleProcess())
    assert module.training
    outputs = module.eval()(images).detach().double()
    assert scores["loss"] == pytest.approx(float(cross_entropy(outputs, labels)), rel=1e-6)
    assert scores["accuracy"] == int((outputs.argmax(1) == labels).sum()) / NUM_SAMPLES


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_same_bits_on_any_number_of_ranks(num_ranks: int, tmp_path: Path) -> None:
    # 24, 12, 3 and 1 blocks: even, uneven, fewer than ranks.
    sizes = [2, 4, 20, 47]
    for scores in run_ranks(_scores, num_ranks, tmp_path, sizes):
        assert scores == _scores(SingleProcess(), sizes)


class _ThreeSums(Classification):
    num_sums = 3

    def metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        assert batch.targets is not None
        return torch.tensor([1.0, float(len(batch)), float(batch.targets.sum())], dtype=torch.float64)

    def summarize(self, sums: Tensor, num_samples: int) -> dict[str, float]:
        return dict(zip(("blocks", "samples", "labels"), sums.tolist(), strict=True))


def test_a_task_says_how_many_sums_it_keeps() -> None:
    module, images, labels = _problem()
    scores = evaluate(module, _ThreeSums(), Examples((images,), labels), 10, SingleProcess())
    assert scores == {"blocks": 5, "samples": 47, "labels": float(labels.sum())}


@pytest.mark.parametrize(("better", "worst"), [("max", 0.5), ("min", 22.5)])
def test_the_worst_decile_is_of_whole_clients_and_on_the_bad_side(better: str, worst: float) -> None:
    # Of 24 clients two; of three, one.
    scores = {client: {"loss": 7.0, "score": float(client)} for client in reversed(range(24))}
    record = over_clients(scores, ("score", better))
    assert record == pytest.approx(
        {
            "client_loss_mean": 7.0,
            "client_loss_std": 0.0,
            "client_score_mean": 11.5,
            "client_score_std": ((24**2 - 1) / 12) ** 0.5,
            "client_score_worst_decile": worst,
        }
    )
    few = over_clients({client: scores[client] for client in range(3)}, ("score", better))
    assert few["client_score_worst_decile"] == (0.0 if better == "max" else 2.0)


def test_the_summary_and_the_console_have_the_clients_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["data.partition.clients=4", "clients_per_round=2", "model={type: mlp, hidden: [4]}", "rounds=2"]
    settings = ["eval.on=[global, clients]", "data.holdout=0.2", f"output={tmp_path}", "name=both"]
    assert main([*small, *settings, "--debug"]) == 0
    (folder,) = tmp_path.glob("both-*")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("client_accuracy_mean", "client_accuracy_std", "client_accuracy_worst_decile"):
        assert summary[f"final_{key}"] == last[key]
    said = capsys.readouterr()
    assert f"of clients {last['client_accuracy_mean']:.4f}" in said.out + said.err
    assert not torch.is_anomaly_enabled()  # what `--debug` turns on does not outlive its run
