"""FedLC, FedDecorr, MOON and FedRCL: the losses as functions, against loops over samples, and where they end."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, exp, log, log1p, pi, sin

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.algorithms.fedrcl import FedRCL, contrast, relaxation, relaxed_contrastive
from fedspec_dist.clients.algorithms.losses import (
    FedDecorr,
    FedLC,
    Moon,
    calibrate,
    contrastive,
    cross_entropy_among_others,
    decorrelation,
)
from fedspec_dist.config.methods import LOCAL_ALGORITHMS, MODELS
from fedspec_dist.models.network import Network
from tests import reference
from tests.clients.harness import F64, START, Echo, a_client, toy, train

INF = float("inf")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def _gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    at = at.clone().requires_grad_()
    value = loss(at)
    return value.detach(), torch.autograd.grad(value, at, allow_unused=True, materialize_grads=True)[0]


def _network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    model = MODELS["mlp"].build((1, 2, 3), 3, hidden=(5, 4)).double()
    model.add_projection(4)
    return model.double()


IMAGES, LABELS = _random(6, 1, 2, 3, seed=1), torch.tensor([0, 1, 2, 0, 1, 0])


# --- FedLC


def test_calibrated_logits_by_hand() -> None:
    z = torch.ones(1, 2, dtype=F64)
    calibrated = calibrate(z, torch.tensor([16, 81]), 1.0)
    assert calibrated.tolist()[0] == pytest.approx([1 / 2, 2 / 3], abs=1e-15)
    assert calibrated.softmax(1).tolist()[0] == pytest.approx([0.4584295168, 0.5415704832], abs=1e-10)
    client = a_client(class_counts=torch.tensor([16, 81]))
    loss, gradient = _gradient(
        lambda x: LOCAL_ALGORITHMS["fedlc"].build().loss(Echo(), x, torch.tensor([0]), client), z
    )
    assert float(loss) == pytest.approx(0.7799487248, abs=1e-10)
    assert gradient.tolist()[0] == pytest.approx([-0.5415704832, 0.5415704832], abs=1e-10)
    literal = LOCAL_ALGORITHMS["fedlc"].build(denominator="others").loss(Echo(), z, torch.tensor([0]), client)
    assert float(literal) == pytest.approx(1 / 6, abs=1e-12)


@pytest.mark.parametrize("tau", [0.1, 1.0])
@pytest.mark.parametrize("denominator", ["all", "others"])
def test_fedlc_is_its_twin_in_loops(tau: float, denominator: str) -> None:
    logits, labels, counts = _random(7, 4, seed=2), torch.tensor([0, 1, 3, 3, 0, 1, 1]), [5, 1, 0, 200]
    client = a_client(class_counts=torch.tensor(counts))
    loss = FedLC(tau, denominator).loss(Echo(), logits, labels, client)
    twin = reference.calibrated_cross_entropy(logits, labels, counts, tau, denominator == "all")
    assert float(loss) == pytest.approx(twin, rel=1e-12)


@pytest.mark.parametrize("denominator", ["all", "others"])
def test_a_class_that_a_client_does_not_have_is_left_out_exactly(denominator: str) -> None:
    client = a_client(class_counts=torch.tensor([3, 0, 4]))
    method, labels = FedLC(0.1, denominator), torch.tensor([0, 2, 2])
    z = _random(3, 3, seed=3)
    loss, gradient = _gradient(lambda x: method.loss(Echo(), x, labels, client), z)
    moved, _ = _gradient(lambda x: method.loss(Echo(), x, labels, client), z + torch.tensor([0, 1e6, 0]))
    assert torch.equal(gradient[:, 1], torch.zeros(3, dtype=F64))
    assert gradient[:, 0].abs().min() > 0
    assert torch.equal(loss, moved)
    assert torch.isneginf(calibrate(z, client.class_counts, 0.1)[:, 1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("denominator", ["all", "others"])
def test_a_client_with_one_class_has_loss_and_gradient_exactly_zero(denominator: str, dtype: torch.dtype) -> None:
    client = a_client(class_counts=torch.tensor([0, 9, 0]))
    method = FedLC(0.1, denominator)
    loss, gradient = _gradient(
        lambda x: method.loss(Echo(), x, torch.tensor([1, 1]), client), 30 * _random(2, 3, seed=4).to(dtype)
    )
    assert loss.item() == 0
    assert torch.equal(gradient, torch.zeros(2, 3, dtype=dtype))


def test_equal_counts_or_no_tau_change_nothing() -> None:
    logits, labels = _random(5, 3, seed=5), torch.tensor([0, 1, 2, 0, 1])
    assert calibrate(logits, torch.tensor([0, 4, 2]), 0.0) is logits
    equal = a_client(class_counts=torch.tensor([7, 7, 7]))
    ours = _gradient(lambda x: LOCAL_ALGORITHMS["fedlc"].build(0.7).loss(Echo(), x, labels, equal), logits)
    torch.testing.assert_close(ours, _gradient(lambda x: cross_entropy(x, labels), logits), rtol=1e-13, atol=1e-15)


def test_the_literal_denominator_has_gradients_of_finite_differences() -> None:
    labels = torch.tensor([0, 2, 1])
    z = calibrate(_random(3, 4, seed=6), torch.tensor([1, 2, 3, 4]), 1.0)
    assert torch.autograd.gradcheck(lambda x: cross_entropy_among_others(x, labels), (z.requires_grad_(),))
    # One sample is alone with its class, the other is not: the mean is over both.
    mixed = torch.tensor([[1.0, -INF, -INF], [1.0, 2.0, -INF]], dtype=F64)
    loss, gradient = _gradient(lambda x: cross_entropy_among_others(x, torch.tensor([0, 0])), mixed)
    assert float(loss) == pytest.approx(0.5)
    assert gradient.tolist() == [[0, 0, 0], [-0.5, 0.5, 0]]


# --- FedDecorr


def test_decorrelation_by_hand() -> None:
    z = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]], dtype=F64)
    assert float(decorrelation(z)) == pytest.approx(0.3333333267, abs=1e-10)
    third = torch.tensor([[0.0], [1.0], [5.0]], dtype=F64)
    assert float(decorrelation(torch.cat([z, third], dim=1))) == pytest.approx(0.7619047522, abs=1e-10)


@pytest.mark.parametrize(("num_samples", "width"), [(2, 2), (5, 3), (4, 9)])
def test_decorrelation_is_its_twin_in_loops(num_samples: int, width: int) -> None:
    features = 3 + _random(num_samples, width, seed=7) * torch.arange(1, width + 1)
    assert float(decorrelation(features)) == pytest.approx(reference.feature_decorrelation(features), rel=1e-12)


def test_decorrelation_grows_with_the_batch_as_the_program_has_it() -> None:
    features = _random(50, 6, seed=8)
    correlations = torch.corrcoef(features.T)
    off_diagonal = correlations[~torch.eye(6, dtype=torch.bool)]
    expected = 49**2 / 50 * off_diagonal.square().mean()
    torch.testing.assert_close(decorrelation(features), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 4), (6, 1), (1, 1)])
def test_without_a_pair_there_is_no_decorrelation(shape: tuple[int, int]) -> None:
    assert torch.equal(decorrelation(_random(*shape, seed=9)), torch.tensor(0.0, dtype=F64))


def test_a_batch_of_one_has_the_tasks_loss_bit_for_bit() -> None:
    model, client = _network(), a_client()
    for method in (FedDecorr(beta=3.0), LOCAL_ALGORITHMS["fedlc"].build(tau=0.0)):
        loss = method.loss(model, IMAGES[:1], LABELS[:1], client)
        assert torch.equal(loss, cross_entropy(model(IMAGES[:1]), LABELS[:1]))


def test_a_constant_feature_contributes_nothing() -> None:
    features = _random(5, 3, seed=10)
    features[:, 1] = 0.5
    loss, gradient = _gradient(decorrelation, features)
    pair = decorrelation(features[:, [0, 2]])
    assert float(loss) == pytest.approx(float(pair) / 3, rel=1e-12)  # one of three pairs
    assert gradient.isfinite().all()


def test_feddecorr_sees_the_features_before_the_classifier() -> None:
    model = _network()
    loss = FedDecorr(beta=0.3).loss(model, IMAGES, LABELS, a_client())
    expected = cross_entropy(model(IMAGES), LABELS) + 0.3 * decorrelation(model.represent(IMAGES))
    torch.testing.assert_close(loss, expected)


# --- MOON


@pytest.mark.parametrize(
    ("z_previous", "expected"),
    [((0.0, 1.0), 0.1269280110), ((1.0, 0.0), 0.6931471806), ((-1.0, 0.0), 0.0181499279), ((-3.0, 0.0), 0.0181499279)],
)
def test_model_contrast_by_hand(z_previous: tuple[float, float], expected: float) -> None:
    z = torch.tensor([[1.0, 0.0]], dtype=F64)
    assert float(contrastive(z, z, torch.tensor([z_previous], dtype=F64), 0.5)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_model_contrast_is_its_twin_in_loops(temperature: float) -> None:
    z, z_global, z_previous = (_random(6, 4, seed=seed) for seed in (11, 12, 13))
    twin = reference.model_contrast(z, z_global, z_previous, temperature)
    assert float(contrastive(z, z_global, z_previous, temperature)) == pytest.approx(twin, rel=1e-12)


def test_the_same_model_twice_has_no_gradient() -> None:
    other = _random(3, 4, seed=14)
    loss, gradient = _gradient(lambda z: contrastive(z, other, other, 0.5), _random(3, 4, seed=15))
    assert float(loss) == pytest.approx(log(2))
    assert torch.equal(gradient, torch.zeros(3, 4, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_features_of_zero_have_a_small_gradient(dtype: torch.dtype) -> None:
    zero = torch.zeros(2, 3, dtype=dtype)
    loss, gradient = _gradient(lambda z: contrastive(z, zero + 1, zero, 0.5), zero)
    assert float(loss) == pytest.approx(log(2))
    assert gradient.abs().max() < 10
    labels = torch.tensor([0, 0, 1])
    _, gradient = _gradient(lambda x: relaxed_contrastive([x], labels), torch.eye(3, dtype=dtype)[:, :2].contiguous())
    assert gradient.abs().max() < 100


def test_moon_without_a_previous_model_has_the_tasks_loss() -> None:
    model = _network()
    loss = LOCAL_ALGORITHMS["moon"].build().loss(model, IMAGES, LABELS, a_client(is_new=True, frozen={}))
    assert torch.equal(loss, cross_entropy(model(IMAGES), LABELS))


def test_moon_differentiates_the_model_in_training_alone() -> None:
    model, there, before = (_network(seed) for seed in range(3))
    client = a_client(is_new=False, frozen={"anchor": there, "previous": before})
    loss = Moon(mu=2.0, temperature=0.1).loss(model, IMAGES, LABELS, client)
    z, z_global, z_previous = (m.represent(IMAGES) for m in (model, there, before))
    expected = cross_entropy(model(IMAGES), LABELS) + 2 * contrastive(z, z_global, z_previous, 0.1)
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, cross_entropy(model(IMAGES), LABELS))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for frozen in (there, before) for parameter in frozen.parameters())


def test_moon_of_a_single_client_is_fedavg() -> None:
    """Its previous model is the global one, wherever it has gone since."""
    model, frozen = _network(), _network(1)
    client = a_client(is_new=False, frozen={"anchor": frozen, "previous": frozen})

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters())))

    ours = LOCAL_ALGORITHMS["moon"].build().loss(model, IMAGES, LABELS, client)
    plain = cross_entropy(model(IMAGES), LABELS)
    assert (ours - plain).item() == pytest.approx(5 * log(2))
    assert all(map(torch.equal, gradients(ours), gradients(plain)))


def test_moon_keeps_the_model_itself() -> None:
    theta = START / 3
    trained = train(LOCAL_ALGORITHMS["moon"].build(), toy(1), theta)
    assert torch.equal(trained.own["previous"], trained.parameters)
    assert not torch.allclose(trained.own["previous"], theta)


# --- FedRCL


def _at_degrees(*angles: float) -> Tensor:
    return torch.tensor([[cos(pi * a / 180), sin(pi * a / 180)] for a in angles], dtype=F64)


def _terms(features: Tensor, labels: list[int]) -> tuple[float, float]:
    same = torch.tensor(labels).unsqueeze(1) == torch.tensor(labels)
    similarities = features @ features.T
    return float(contrast(similarities, same, 0.05)), float(relaxation(similarities, same, 0.05, 0.7))


def test_relaxed_contrast_by_hand() -> None:
    scl, penalty = _terms(_at_degrees(0, 30, 90, 180), [0, 0, 1, 1])
    assert scl == pytest.approx((3.00e-8 + 6.616069580e-4 + 10.0000907957 + 3.21e-8) / 4, abs=1e-9)
    assert scl == pytest.approx(2.5001881162, abs=1e-9)
    assert penalty == pytest.approx(0.0331737537, abs=1e-9)
    scl, penalty = _terms(_at_degrees(0, 60, 90, 180), [0, 0, 1, 1])
    assert scl == pytest.approx((4.54e-5 + 7.3211697 + 17.3205081 + 4.54e-5) / 4, abs=1e-7)
    assert penalty == pytest.approx(0, abs=1e-16)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.7])
def test_relaxed_contrast_is_its_twin_in_loops(temperature: float, threshold: float) -> None:
    labels = torch.tensor([0, 1, 2, 0, 0, 1, 3, 0])
    levels = [_random(8, 3, 2, 4, seed=16) + 0.5, _random(8, 5, seed=17), _random(8, 4, 1, 1, seed=18)]
    twins = [reference.relaxed_contrast(level, labels, temperature, threshold) for level in levels]
    settings = {"temperature": temperature, "threshold": threshold}
    for chosen, weights in ((0, (1.0, 0.0)), (1, (0.0, 1.0))):
        loss = relaxed_contrastive(levels, labels, contrast_weight=weights[0], relaxation_weight=weights[1], **settings)
        assert float(loss) == pytest.approx(sum(twin[chosen] for twin in twins) / 3, rel=1e-9)
    both = relaxed_contrastive(levels, labels, contrast_weight=0.3, relaxation_weight=2.0, **settings)
    assert float(both) == pytest.approx(sum(0.3 * s + 2 * p for s, p in twins) / 3, rel=1e-9)


def test_at_the_threshold_the_relaxation_acts() -> None:
    similarities = torch.tensor([[1.0, 0.75], [0.75, 1.0]], dtype=F64)
    same = torch.ones(2, 2, dtype=torch.bool)
    assert float(relaxation(similarities, same, 0.5, 0.75)) == pytest.approx(log1p(exp(-0.5)))
    assert float(relaxation(similarities, same, 0.5, 0.76)) == pytest.approx(log1p(exp(-4)))


DEGENERATE = {"one class": [1, 1, 1], "all different": [0, 1, 2], "one sample": [4]}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("labels", DEGENERATE.values(), ids=DEGENERATE)
def test_degenerate_batches_have_finite_gradients(labels: list[int], dtype: torch.dtype) -> None:
    levels = _random(len(labels), 3, 2, 2, seed=19).to(dtype)
    loss, gradient = _gradient(lambda x: relaxed_contrastive([x], torch.tensor(labels)), levels)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_degenerate_batches_by_hand() -> None:
    assert _terms(_at_degrees(0, 10, 90), [1, 1, 1])[0] == 0  # no negatives
    scl, penalty = _terms(_at_degrees(0, 60), [0, 1])  # the positive is the sample itself
    assert scl == pytest.approx(log1p(exp((0.5 - 1) / 0.05)))
    assert penalty == pytest.approx(log1p(exp(-40)))
    assert _terms(_at_degrees(20), [0]) == (0, pytest.approx(log1p(exp(-40))))


@pytest.mark.parametrize("threshold", [-1.0, 0.7])
def test_a_sample_alone_has_no_gradient(threshold: float) -> None:
    def loss(x: Tensor) -> Tensor:
        return relaxed_contrastive([x], torch.tensor([3]), threshold=threshold)

    _, gradient = _gradient(loss, _random(1, 5, seed=20))
    assert torch.equal(gradient, torch.zeros(1, 5, dtype=F64))


def test_fedrcl_asks_the_model_for_its_levels() -> None:
    model = _network()
    levels: list[Tensor] = []
    model.represent(IMAGES, levels)
    assert len(levels) == 2
    method = FedRCL(temperature=0.2, threshold=0.1, contrast_weight=0.5, relaxation_weight=2.0)
    expected = cross_entropy(model(IMAGES), LABELS) + relaxed_contrastive(
        levels, LABELS, temperature=0.2, threshold=0.1, contrast_weight=0.5, relaxation_weight=2.0
    )
    torch.testing.assert_close(method.loss(model, IMAGES, LABELS, a_client()), expected)


def test_fedrcl_names_a_model_without_hidden_layers() -> None:
    linear = MODELS["mlp"].build((1, 2, 3), 3, hidden=()).double()
    with pytest.raises(ValueError, match=r"^local\.algorithm\.type: fedrcl contrasts what hidden layers put out"):
        LOCAL_ALGORITHMS["fedrcl"].build().loss(linear, IMAGES, LABELS, a_client())


# --- On a network


@pytest.mark.parametrize(
    "method",
    [
        LOCAL_ALGORITHMS["fedlc"].build(),
        LOCAL_ALGORITHMS["feddecorr"].build(),
        LOCAL_ALGORITHMS["moon"].build(),
        LOCAL_ALGORITHMS["fedrcl"].build(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_gradients_reach_all_parameters_and_are_finite(method: LocalAlgorithm) -> None:
    model: nn.Module = _network().float()
    frozen = {"anchor": _network(1).float(), "previous": _network(2).float()}
    counts = torch.bincount(LABELS, minlength=3)
    client = a_client(class_counts=counts, is_new=False, frozen=frozen)
    loss = method.loss(model, IMAGES.float(), LABELS, client)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    for gradient in torch.autograd.grad(loss, list(model.parameters())):
        assert gradient.isfinite().all()
