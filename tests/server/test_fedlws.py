"""FedLWS's worked numbers, its layers in every model, and what it is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedspec_dist.config.methods import AGGREGATORS, MODELS
from fedspec_dist.core.cohort import Direction
from fedspec_dist.core.parameters import ParameterLayout, Segment
from fedspec_dist.server.aggregators.fedlws import layer_groups, mean_distances
from tests.reference import dense_cohort

THETA = torch.tensor([3.0, 4.0], dtype=torch.float64)
UPDATES = torch.tensor([[0.3, 0.4], [0, -0.4]], dtype=torch.float64)
ONE_LAYER = [Segment("fc.weight", (1, 2), 0, 2)]


def direction(
    parameters: dict[str, float], updates: Tensor = UPDATES, theta: Tensor = THETA, layers: list[Segment] = ONE_LAYER
) -> Direction:
    return AGGREGATORS["fedlws"].build(**parameters).direction(dense_cohort(updates, theta, segments=layers))


@pytest.mark.parametrize(
    ("beta", "gamma", "model"),
    [(0.03, 0.9996156676, (3.1487893529, 3.9984626704)), (1.0, 0.9940357853, (3.1312127237, 3.9761431412))],
)
def test_worked_numbers(beta: float, gamma: float, model: tuple[float, float]) -> None:
    result = direction({"beta": beta})
    torch.testing.assert_close(THETA + result.slice, torch.tensor(model, dtype=torch.float64), rtol=0, atol=1e-9)
    assert result.diagnostics["fedlws/gamma_mean"] == pytest.approx(gamma, abs=1e-9)


def test_the_spread_that_tau_is_made_of() -> None:
    distances = mean_distances((UPDATES @ UPDATES.T).unsqueeze(0))
    assert distances.tolist() == pytest.approx([0.4272001873], abs=1e-10)
    assert (0.03 * distances).tolist() == pytest.approx([0.0128160056], abs=1e-10)
    # The clients' distances differ, and their mean is not that of the squares.
    uneven = torch.tensor([[[36.0, 0, 0], [0, 0, 0], [0, 0, 0]]], dtype=torch.float64)
    assert mean_distances(uneven).tolist() == pytest.approx([(4 + 2 + 2) / 3], abs=1e-10)


def test_without_tau_exactly_fedavg() -> None:
    result = direction({"min_tau": 0.0, "max_tau": 0.0})
    assert torch.equal(result.slice, 0.5 * UPDATES[0] + 0.5 * UPDATES[1])


@pytest.mark.parametrize("updates", [UPDATES, UPDATES[:1], UPDATES[:1].expand(2, -1)], ids=["beta", "one", "equal"])
def test_beta_zero_one_client_and_equal_updates_shrink_by_min_tau(updates: Tensor) -> None:
    result = direction({"beta": 0.0} if updates is UPDATES else {}, updates)
    mean = updates.mean(0)
    gamma = 5 / (5 + 0.01 * mean.norm())
    torch.testing.assert_close(result.slice, gamma * (THETA + mean) - THETA)
    assert (result.slice - mean).norm() > 1e-4


def test_each_layer_has_a_factor_of_its_own() -> None:
    layers = [Segment("a.weight", (1, 1), 0, 1), Segment("b.weight", (1, 1), 1, 1)]
    updates = torch.tensor([[0.6, 0], [0, 0]], dtype=torch.float64)
    result = direction({}, updates, layers=layers)
    gamma = 3 / (3 + 0.01 * 0.3)
    torch.testing.assert_close(THETA + result.slice, torch.tensor([gamma * 3.3, 4.0], dtype=torch.float64))
    assert result.diagnostics == {
        "fedlws/gamma_mean": pytest.approx((gamma + 1) / 2),
        "fedlws/gamma_min": pytest.approx(gamma),
    }


def test_a_layer_of_zeros() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    assert not direction({}, torch.zeros(2, 2, dtype=torch.float64), zero).slice.any()
    assert not direction({}, UPDATES, zero).slice.any(), "shrunk to nothing by the formula"
    assert direction({"min_tau": 0.0, "max_tau": 0.0}, UPDATES, zero).slice.any()


def names_of_layers(module: nn.Module, trainable: tuple[str, ...] = ("*",)) -> list[list[str]]:
    layout = ParameterLayout(module, trainable)
    groups = layer_groups(layout.segments)
    assert [start for start, _ in groups] == [0, *(stop for _, stop in groups[:-1])]
    assert groups[-1][1] == len(layout)
    return [[s.name for s in layout.segments if start <= s.start < stop] for start, stop in groups]


def modules(*names: str) -> list[str]:
    return [f"{name}.{part}" for name in names for part in ("weight", "bias")]


def _residual(block: int) -> list[list[str]]:
    path = f"blocks.{block}."
    layers = [[f"{path}conv{i}.weight", *modules(f"{path}norm{i}")] for i in (1, 2)]
    shortcut = [f"{path}shortcut.0.weight", *modules(f"{path}shortcut.1")]
    return [*layers, shortcut] if block in (3, 6) else layers


LAYERS = {
    "mlp": [modules("features.0"), modules("features.2"), modules("fc")],
    "cnn": [modules("conv1", "norm1"), modules("conv2", "norm2"), modules("conv3", "norm3"), modules("fc")],
    "cnn8k": [["convs.0.weight"], ["convs.1.weight"], ["fc1.weight"], ["fc2.weight"]],
    "cnn23k": [["convs.0.weight"], ["convs.1.weight"], ["fc1.weight"], ["fc2.weight"]],
    "cnn207k": [["convs.0.weight"], ["convs.1.weight"], ["convs.2.weight"], ["fc1.weight"], ["fc2.weight"]],
    "lenet": [modules(name) for name in ("conv1", "conv2", "fc1", "fc2", "fc3")],
    "resnet20": [
        ["conv.weight", *modules("norm")],
        *(layer for block in range(9) for layer in _residual(block)),
        modules("fc"),
    ],
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_model(name: str) -> None:
    assert names_of_layers(MODELS[name].build((3, 32, 32), 10)) == LAYERS[name]


def test_layers_of_a_model_without_norms_and_of_a_part_of_one() -> None:
    cnn = MODELS["cnn"].build((3, 32, 32), 10, norm="none")
    assert names_of_layers(cnn) == [modules("conv1"), modules("conv2"), modules("conv3"), modules("fc")]
    resnet = MODELS["resnet20"].build((3, 32, 32), 10)
    assert names_of_layers(resnet, ("blocks.0.norm*", "fc.bias")) == [
        modules("blocks.0.norm1"),
        modules("blocks.0.norm2"),
        ["fc.bias"],
    ]


def test_layers_must_be_known() -> None:
    with pytest.raises(AssertionError, match="fedlws needs to know the layers"):
        AGGREGATORS["fedlws"].build().direction(dense_cohort(UPDATES))
