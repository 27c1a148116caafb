"""Classes of sequences and of their places: loss, metrics and curvature, against sums over the places in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian
from torch.nn import Identity

from fedspec_dist.core.batch import Batch
from fedspec_dist.data.dataset import Dataset, Examples
from fedspec_dist.tasks.language import Language
from tests.reference import sequence_scores

DRAW = torch.Generator().manual_seed(0)


def drawn(*shape: int, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Outputs `[*shape]` and targets `[*shape[:-1]]`, a third of which are ignored, with all of sample 1's."""
    outputs = torch.randn(shape, generator=DRAW, dtype=torch.float64)
    targets = torch.randint(shape[-1], shape[:-1], generator=DRAW)
    targets[torch.rand(shape[:-1], generator=DRAW) < 0.3] = ignored
    targets[1] = ignored
    return outputs, targets


def data_of(targets: Tensor | None, num_outputs: int = 5) -> Dataset:
    examples = Examples((torch.zeros(4, 1),), targets)
    return Dataset(examples, examples, num_outputs=num_outputs)


@pytest.mark.parametrize("ignored", [-100, -1])
@pytest.mark.parametrize("shape", [(7, 4, 5), (7, 1, 5), (7, 5), (40, 3, 2)])
def test_scores_and_loss_are_those_of_the_places_that_count(shape: tuple[int, ...], ignored: int) -> None:
    outputs, targets = drawn(*shape, ignored=ignored)
    task, expected = Language(ignored), sequence_scores(outputs, targets, ignored)
    assert float(task.output_loss(outputs, targets)) == pytest.approx(expected["loss"], rel=1e-12)
    losses, counts = task.terms(outputs, targets)
    assert losses.shape == counts.shape == (shape[0],)
    assert float(losses.sum() / counts.sum()) == pytest.approx(expected["loss"], rel=1e-12)
    for block in (len(targets), 3, 1):  # a block of sample 1 alone counts nothing
        batches = [Batch(outputs[i : i + block], targets[i : i + block]) for i in range(0, len(targets), block)]
        sums = torch.stack([task.metrics(Identity(), batch) for batch in batches])
        assert sums.dtype == torch.float64
        assert task.summarize(sums.sum(0), len(targets)) == pytest.approx(expected, rel=1e-12)


def test_nothing_that_counts_is_no_loss_and_no_gradient() -> None:
    outputs, targets = torch.randn(2, 3, 4, requires_grad=True), torch.full((2, 3), -100)
    task = Language(-100)
    task.output_loss(outputs, targets).backward()
    assert outputs.grad is not None
    assert not outputs.grad.any()
    summary = task.summarize(task.metrics(Identity(), Batch(outputs.detach(), targets)), 2)
    assert summary == {"loss": 0.0, "accuracy": 0.0, "perplexity": 1.0}


def test_a_large_loss_has_a_perplexity() -> None:
    summary = Language(-100).summarize(torch.tensor([8000.0, 0.0, 1.0], dtype=torch.float64), 1)
    assert summary["perplexity"] > 1e300


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_the_curvature_is_the_hessian_of_a_samples_loss(scale: float) -> None:
    task, outputs = Language(-100), scale * torch.randn(6, 4, generator=DRAW, dtype=torch.float64)
    tangents = torch.randn(6, 4, 3, generator=DRAW, dtype=torch.float64)
    targets = torch.arange(6) % 4
    matrices = torch.stack(
        [
            hessian(lambda row, n=n: task.output_loss(row.unsqueeze(0), targets[n : n + 1]), outputs[n])  # type: ignore[misc]
            for n in range(6)
        ]
    )
    applied = task.curvature(outputs, tangents)
    torch.testing.assert_close(applied, matrices @ tangents, rtol=0, atol=1e-12)
    root = task.curvature_root(outputs, tangents)
    torch.testing.assert_close(root.mT @ root, tangents.mT @ applied, rtol=0, atol=1e-12)


def test_places_have_no_curvature() -> None:
    Language(-100).check_curvature(data_of(torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"^server\.aggregator: .*task language has for one target a sequence only"):
        Language(-100).check_curvature(data_of(torch.zeros(4, 3, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (torch.zeros(4, 3), "type float32; allowed with real numbers: task regression"),
        (torch.zeros(4, 3, 2, dtype=torch.int64), "type int64; allowed with them: a task of your own"),
        (None, "none; allowed with it: a task of your own"),
    ],
)
def test_other_targets_are_told_which_task_fits(targets: Tensor | None, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^task: language needs a whole number.*{problem}"):
        Language(-100).check(data_of(targets))


@pytest.mark.parametrize(("ignored", "lowest"), [(-100, -1), (-1, -100)])
def test_a_number_of_no_class_is_refused_unless_it_is_the_ignored_one(ignored: int, lowest: int) -> None:
    targets = torch.tensor([0, 4, ignored, 3])
    Language(ignored).check(data_of(targets))
    with pytest.raises(ValueError, match=rf"^task: language: the targets range from {lowest} to 4; allowed are 0 to 4"):
        Language(ignored).check(data_of(torch.cat([targets, torch.tensor([lowest])])))
    with pytest.raises(ValueError, match=r"range from 0 to 4; allowed are 0 to 3, and task\.ignore_index"):
        Language(ignored).check(data_of(targets, num_outputs=4))


@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 4), (4, 2, 5)])
def test_a_model_of_another_form_is_refused(shape: tuple[int, ...]) -> None:
    batch = Batch(torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^model: mine gives shape .*; allowed is \[4, 3, 5\]"):
        Language(-100).check_outputs("mine", torch.zeros(shape), batch, 5)
