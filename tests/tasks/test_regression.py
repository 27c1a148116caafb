"""Squared errors: loss, metrics and curvature, against sums over the values in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Identity

from fedspec_dist.core.batch import Batch
from fedspec_dist.data.dataset import Dataset, Examples
from fedspec_dist.tasks.regression import Regression
from tests.reference import regression_scores


def task_for(targets: Tensor, num_outputs: int = 0) -> Regression:
    """As a run makes it: told the data first."""
    examples = Examples((torch.zeros(len(targets), 1),), targets)
    task = Regression()
    task.check(Dataset(examples, examples, num_outputs=num_outputs or targets[0].numel()))
    return task


def scored(task: Regression, outputs: Tensor, targets: Tensor, block: int) -> dict[str, float]:
    batches = [Batch(outputs[i : i + block], targets[i : i + block]) for i in range(0, len(targets), block)]
    sums = torch.stack([task.metrics(Identity(), batch) for batch in batches])
    assert sums.dtype == torch.float64
    assert sums.shape == (len(batches), task.num_sums)
    return task.summarize(sums.sum(0), len(targets))


def drawn(*shape: int, centre: float = 0.0) -> Tensor:
    return centre + torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize(
    ("shape", "of_outputs", "centre"),
    [
        ((7, 3), (7, 3), 0.0),
        ((7, 1), (7, 1), 0.0),
        ((7,), (7, 1), 0.0),
        ((7, 1), (7,), 0.0),
        ((7,), (7,), 0.0),
        ((7, 2), (7, 2), 1000.0),  # sums of squares, from which the square of the sum is taken
    ],
)
def test_scores_and_loss_are_those_of_the_values(
    shape: tuple[int, ...], of_outputs: tuple[int, ...], centre: float
) -> None:
    targets = drawn(*shape, centre=centre)
    outputs = (targets + 0.5 * drawn(7, 9)[:, : targets[0].numel()].reshape(shape)).reshape(of_outputs)
    expected = regression_scores(outputs.reshape(7, -1), targets.reshape(7, -1))
    task = task_for(targets)
    for block in (7, 3, 1):
        assert scored(task, outputs, targets, block) == pytest.approx(expected, rel=1e-7)
    assert float(task.output_loss(outputs, targets)) == pytest.approx(expected["mse"], rel=1e-12)
    losses, counts = task.terms(outputs, targets)
    assert float(losses.sum() / counts.sum()) == pytest.approx(expected["mse"], rel=1e-12)


@pytest.mark.parametrize("value", [0.0, 3.0, 0.1, 1e6])
def test_equal_targets_explain_nothing(value: float) -> None:
    targets = torch.full((9, 1), value)
    assert scored(task_for(targets), targets + 1, targets, 4)["r2"] == 0


def test_the_loss_is_in_the_type_of_the_model() -> None:
    outputs, targets = drawn(4, 2).float().requires_grad_(), drawn(4, 2)
    loss = task_for(targets).output_loss(outputs, targets)
    assert loss.dtype == torch.float32
    loss.backward()
    assert outputs.grad is not None
    torch.testing.assert_close(outputs.grad, (2 / 8 * (outputs.detach() - targets.float())))


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (torch.zeros(4, dtype=torch.int64), "type int64; allowed with a class for each sample: task classification"),
        (torch.zeros(4, 3, dtype=torch.int64), "int64; allowed with a class at each place: task language"),
        (torch.zeros(4, 3, 2), r"shape \[4, 3, 2\] and type float32; allowed with them: a task of your own"),
    ],
)
def test_other_targets_are_told_which_task_fits(targets: Tensor, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^task: regression needs real numbers.*{problem}"):
        task_for(targets)


def test_targets_of_another_width_than_the_data_set_says_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^data\.dataset: num_outputs is 1, but a target has 2 values"):
        task_for(torch.zeros(4, 2), num_outputs=1)


def test_a_model_of_another_width_is_refused() -> None:
    batch = Batch(torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"^model: mine gives shape \[4, 3\] for 4 samples; allowed is \[4, 2\]"):
        task_for(torch.zeros(4, 2)).check_outputs("mine", torch.zeros(4, 3), batch, 2)
