"""Softmax cross-entropy: loss, metrics and curvature."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedspec_dist.core.batch import Batch
from fedspec_dist.data.dataset import Dataset, Examples
from fedspec_dist.tasks.classification import Classification
from tests.reference import softmax_curvature

TASK = Classification()
IDENTITY = torch.nn.Identity()


def random_outputs(num_samples: int, num_classes: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(num_samples)
    return scale * torch.randn(num_samples, num_classes, generator=generator, dtype=torch.float64)


def test_loss_of_two_samples() -> None:
    outputs = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    assert float(TASK.output_loss(outputs, torch.tensor([0, 1]))) == pytest.approx((math.log(2) + math.log(4)) / 2)


def test_loss_is_differentiable() -> None:
    outputs = torch.zeros(2, 2, requires_grad=True)
    TASK.output_loss(outputs, torch.tensor([0, 1])).backward()
    assert outputs.grad is not None
    assert outputs.grad.tolist() == [[-0.25, 0.25], [0.25, -0.25]]


def test_metrics_add_up_over_blocks() -> None:
    outputs, labels = random_outputs(10, 3).float(), torch.arange(10) % 3
    blocks = [TASK.metrics(IDENTITY, Batch(outputs[i : i + 4], labels[i : i + 4])) for i in range(0, 10, 4)]
    whole = TASK.metrics(IDENTITY, Batch(outputs, labels))
    assert (whole.dtype, whole.shape) == (torch.float64, (2,))
    torch.testing.assert_close(torch.stack(blocks).sum(0), whole, rtol=1e-14, atol=0)
    assert float(whole[0]) == pytest.approx(10 * float(TASK.output_loss(outputs, labels)), rel=1e-6)
    assert float(whole[1]) == sum(int(row.argmax()) == int(y) for row, y in zip(outputs, labels, strict=True))


def test_summary() -> None:
    summary = TASK.summarize(torch.tensor([5.0, 3.0], dtype=torch.float64), 4)
    assert summary == {"loss": 1.25, "accuracy": 0.75}


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize(("num_samples", "num_classes", "num_columns"), [(5, 4, 3), (1, 2, 1), (3, 1, 2)])
def test_curvature_and_its_root(num_samples: int, num_classes: int, num_columns: int, scale: float) -> None:
    outputs = random_outputs(num_samples, num_classes, scale)
    generator = torch.Generator().manual_seed(0)
    tangents = torch.randn(num_samples, num_classes, num_columns, generator=generator, dtype=torch.float64)
    matrices = torch.stack([softmax_curvature(row) for row in outputs])
    applied = TASK.curvature(outputs, tangents)
    torch.testing.assert_close(applied, matrices @ tangents, rtol=0, atol=1e-13)
    root = TASK.curvature_root(outputs, tangents)
    assert root.shape == tangents.shape
    torch.testing.assert_close(root.mT @ root, tangents.mT @ applied, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (torch.zeros(3), r"a class number.*shape \[3\] and type float32; allowed with real numbers: task regression"),
        (torch.zeros(3, 2, dtype=torch.int64), "a class number.*allowed with a class at each place: task language"),
        (None, "a class number.*has none; allowed with it: a task of your own"),
        (torch.tensor([0, 2, -1]), "the targets range from -1 to 2; allowed are 0 to 2"),
        (torch.tensor([0, 3, 1]), "the targets range from 0 to 3; allowed are 0 to 2"),
    ],
)
def test_other_targets_are_refused_and_told_which_task_fits(targets: Tensor | None, problem: str) -> None:
    examples = Examples((torch.zeros(3, 1),), targets)
    with pytest.raises(ValueError, match=rf"^task: classification.*{problem}"):
        TASK.check(Dataset(examples, examples, num_outputs=3))


def test_saturated_outputs_have_no_curvature() -> None:
    outputs = torch.tensor([[1000.0, 0.0, 0.0]])
    tangents = torch.ones(1, 3, 2)
    tangents[0, 1] = 5
    assert not TASK.curvature(outputs, tangents).any()
    assert not TASK.curvature_root(outputs, tangents).any()
