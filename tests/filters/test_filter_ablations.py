"""Random suppression's draws; the length that rescaling leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedspec_dist.config.methods import FILTERS
from fedspec_dist.core.parameters import Segment
from fedspec_dist.filters.spectral import num_removed
from tests.filters.layers import given, random_gradient, segments
from tests.reference import randomly_suppressed_matrices


def steps(seed: int, num_steps: int = 2, round_number: int = 1, ratio: float = 0.2) -> Tensor:
    """One gradient as each of a client's steps leaves it, `[steps, P]`."""
    suppression = FILTERS["random"].build(segments(), ratio=ratio)
    suppression(random_gradient())  # another client's step, before
    suppression.prepare(round_number, seed)
    result = random_gradient().repeat(num_steps, 1)
    for row in result:
        suppression(row)
    return result


def test_draws_repeat_with_the_seed_and_with_nothing_else() -> None:
    first, second = steps(seed=5)
    assert torch.equal(torch.stack([first, second]), steps(seed=5))
    assert torch.equal(torch.stack([first, second]), steps(seed=5, round_number=9))
    for layer in (segment for segment in segments() if segment.size >= 40):  # 5985 draws or more
        entries = slice(layer.start, layer.stop)
        assert not torch.allclose(first[entries], second[entries]), f"both steps of {layer.name}"
        assert not torch.allclose(first[entries], steps(seed=5 + 2**32)[0][entries]), f"both clients of {layer.name}"


def test_every_step_draws_for_the_layers_in_their_order() -> None:
    for step, result in enumerate(steps(seed=5, num_steps=3), start=1):
        matrices = randomly_suppressed_matrices([segment.size for segment in segments()], 0.2, seed=5, step=step)
        torch.testing.assert_close(
            result, torch.block_diag(*matrices) @ random_gradient(), rtol=0, atol=1e-13, msg=f"step {step}"
        )


def test_as_many_coefficients_go_as_the_high_pass_takes() -> None:
    result = steps(seed=5)[0]
    for layer in segments():
        magnitudes = torch.fft.rfft(result[layer.start : layer.stop]).abs()
        assert int((magnitudes < 1e-12).sum()) == num_removed(layer.size, 0.2)


def test_all_coefficients_are_drawn_equally_often() -> None:
    layer, ratio, num_draws = Segment("layer", (39,), 0, 39), 0.25, 2000
    suppression = FILTERS["random"].build([layer], ratio)
    impulse = torch.zeros(39, dtype=torch.float64)
    impulse[0] = 1
    removed = torch.zeros(20)
    for _ in range(num_draws):
        result = impulse.clone()
        suppression(result)
        removed += torch.fft.rfft(result).abs() < 0.5
    # Each count is binomial, of standard deviation sqrt(0.25 * 0.75 / 2000) = 0.0097.
    torch.testing.assert_close(removed / num_draws, torch.full((20,), ratio), rtol=0, atol=0.045)


@pytest.mark.parametrize("order", ["0123", "1023", "random"])
def test_rescaling_leaves_the_filtered_length_and_the_own_direction(order: str) -> None:
    gradient = random_gradient()
    rescaled, high = gradient.clone(), gradient.clone()
    FILTERS["l2_rescale"].build(given(), 0.3, order)(rescaled)
    FILTERS["rfft"].build(given(), 0.3, order)(high)
    for layer in given():
        entries = slice(layer.start, layer.stop)
        assert float(rescaled[entries].norm()) == pytest.approx(float(high[entries].norm()), abs=1e-13)
        cosine = torch.cosine_similarity(rescaled[entries], gradient[entries], dim=0)
        assert float(cosine) == pytest.approx(1, abs=1e-12)


def test_worked_rescaling() -> None:
    gradient = torch.tensor([[4.0, 2, 0, 2], [0, 0, 0, 0], [3, 3, 3, 3]], dtype=torch.float64)
    FILTERS["l2_rescale"].build([Segment("layer", (4,), 0, 4)], ratio=0.34)(gradient)
    # (4, 2, 0, 2) has the length sqrt(24), without its mean sqrt(8).
    expected = torch.tensor([[4.0, 2, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64) / 3**0.5
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


def test_a_gradient_that_is_not_finite_stays_visible() -> None:
    gradient = torch.ones(40)
    gradient[3] = float("nan")
    FILTERS["l2_rescale"].build([Segment("layer", (40,), 0, 40)])(gradient)
    assert gradient.isnan().all()
