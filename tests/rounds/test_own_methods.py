"""Methods of a user's own: the natural small class of every family runs, or one sentence says why it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.config import load, methods
from fedspec_dist.core.batch import Batch
from fedspec_dist.core.cohort import Cohort, Direction
from fedspec_dist.data.images.arrays import Arrays
from fedspec_dist.data.source import Source
from fedspec_dist.filters.identity import Identity
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.making import build_model
from fedspec_dist.rounds.phase_check import check_patterns
from fedspec_dist.rounds.stage import cut_columns
from fedspec_dist.server.protocols import AnyLayers, Weights
from fedspec_dist.server.weights.shares import Stateless
from fedspec_dist.tasks.classification import Classification
from tests.rounds.jobs import run_job, tiny

RNG = np.random.default_rng(0)


# ------------------------------------------------------------------------------------------ data sets


class BareData:
    def __init__(self, root: Path, download: bool, seed: int) -> None:
        pass

    def load(self) -> Arrays:
        raise AssertionError("never asked")


class MyData(Source):
    """Lists, float64 and int32: what a reader of files gives."""

    def load(self) -> Arrays:
        rng = np.random.default_rng(self.seed)
        labels = np.arange(60, dtype=np.int32) % 3
        images = rng.random((60, 8, 8)) + labels[:, None, None]
        return Arrays.of((images[:45], labels[:45].tolist()), (images[45:], labels[45:]))


class MyFiles(MyData):
    embedded = False


class RawData(MyData):
    """Not converted."""

    def load(self) -> Any:
        return Arrays(RNG.random((9, 8, 8)), np.arange(9), RNG.random((9, 8, 8)), np.arange(9), 9, (0.5,), (1.0,))


class ShortLabels(MyData):
    def load(self) -> Any:
        return Arrays.of((RNG.random((9, 8, 8)), ["cat"] * 9), (RNG.random((9, 8, 8)), [0] * 9))


class Tuples(MyData):
    def load(self) -> Any:
        return RNG.random((9, 8, 8)), np.arange(9)


class WrongMean(MyData):
    def load(self) -> Any:
        images = RNG.random((9, 8, 8, 1)).astype(np.float32)
        return Arrays(images, np.arange(9), images, np.arange(9), 9, (0.5, 0.5), (1.0, 0.0))


class Missing(MyData):
    def load(self) -> Any:
        return np.loadtxt(self.root / "nowhere.csv")


class NoLoad(Source):
    pass


# ------------------------------------------------------------------------------------------ models


class Net(nn.Module):
    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.fc = nn.Linear(channels * height * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(images.flatten(1))


class NoArguments(Net):
    def __init__(self) -> None:
        super().__init__((1, 8, 8), 3)


class OtherClasses(Net):
    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__(input_shape, 7)


class OtherImages(Net):
    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__((3, 32, 32), num_classes)


class WithBatchNorm(Net):
    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.norm = nn.BatchNorm1d(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(super().forward(images))


class Doubles(Net):
    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.extra = nn.Parameter(torch.zeros(1, dtype=torch.float64))


class WithPositions(Net):
    """A constant of floating point, kept and not kept with the state, and one that batch norm never changes."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.register_buffer("positions", torch.rand(input_shape))
        self.register_buffer("bound", torch.tensor(4.0), persistent=False)
        self.norm = nn.BatchNorm2d(input_shape[0], track_running_stats=False)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward((self.norm(images) + self.positions).clamp(max=self.bound))


class Tied(nn.Module):
    """Two layers with one weight, under two names, and a third that is a view of none."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        size = input_shape[0] * input_shape[1] * input_shape[2]
        self.first, self.second = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.second.weight = self.first.weight
        self.fc = nn.Linear(size, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(functional.relu(self.second(functional.relu(self.first(images.flatten(1))))))


def a_number(input_shape: tuple[int, int, int], num_classes: int) -> int:
    return 7


# ------------------------------------------------------------------------------------------ the others


def in_turn(samples: Any, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    return [np.arange(client, len(samples), num_clients) for client in range(num_clients)]


def twice(samples: Any, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    return [np.arange(9)] * num_clients


def nothing(samples: Any, num_clients: int, rng: np.random.Generator) -> None:
    return None


def without_rng(samples: Any, num_clients: int) -> list[np.ndarray]:
    return in_turn(samples, num_clients, RNG)


class Shapeless(nn.Module):
    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(images.flatten(1))


class BareFilter:
    def __init__(self, segments: Any) -> None:
        pass

    def __call__(self, gradient: Tensor) -> None:
        gradient.mul_(0.5)


class NeverCalled:
    def __init__(self, segments: Any) -> None:
        pass

    def prepare(self, round_number: int, seed: int) -> None:
        pass


class Halving(Identity):
    def __call__(self, gradient: Tensor) -> None:
        gradient.mul_(0.5)


class BareLocal:
    def correct(self, vectors: Any) -> None:
        vectors.gradient.mul_(0.5)


class MyLocal(LocalAlgorithm):
    def correct(self, vectors: Any) -> None:
        vectors.gradient.mul_(0.5)


class BareMean:
    def direction(self, cohort: Cohort) -> Direction:
        return Direction(cohort.updates.combine(cohort.weights))


class MyMean(AnyLayers):
    def __init__(self, rank: int = 500) -> None:
        self.rank = rank

    def direction(self, cohort: Cohort) -> Direction:
        return Direction(cohort.updates.combine(cohort.weights))


class JustATensor(AnyLayers):
    def direction(self, cohort: Cohort) -> Any:
        return cohort.updates.combine(cohort.weights)


class Unknown(MyMean):
    needs = frozenset({"hessian"})


class Sketching(MyMean):
    needs = frozenset({"sketches"})

    def __init__(self) -> None:
        super().__init__()


class BareWeights:
    def weigh(self, cohort: Cohort, state: dict[str, Tensor]) -> Weights:
        return Weights(cohort.weights)


class MyWeights(Stateless):
    def weigh(self, cohort: Cohort, state: dict[str, Tensor]) -> Weights:
        return Weights(cohort.weights)


class TensorWeights(Stateless):
    def weigh(self, cohort: Cohort, state: dict[str, Tensor]) -> Any:
        return cohort.weights


class BareOptimizer:
    def step(self, theta: Tensor, direction: Tensor, state: dict[str, Tensor]) -> Tensor:
        return (theta + direction).to(theta.dtype)


class MyOptimizer(BareOptimizer):
    def initial_state(self, num_columns: int) -> dict[str, Tensor]:
        return {}


RANK = {"rank": (Annotated[int, methods.Field(ge=1)], 500)}
# family -> class or function, what `register` is told of it, and what the message has; None: it runs.
TABLE: list[tuple[str, Any, dict[str, Any], str | None]] = [
    ("data.dataset", BareData, {}, "has no embedded, download, fingerprint; derive it from .*source.Source"),
    ("data.dataset", MyData, {}, None),
    ("data.dataset", MyFiles, {}, None),
    ("data.dataset", RawData, {}, r"train images have shape \[9, 8, 8\] and type float64; allowed .*Arrays\.of"),
    ("data.dataset", ShortLabels, {}, "train labels have .* type <U3; allowed are numpy arrays .*int64"),
    ("data.dataset", Tuples, {}, r"load\(\) of mine_\w+ gave a tuple; allowed .*Arrays"),
    ("data.dataset", WrongMean, {}, r"mean \(0\.5, 0\.5\) and std .* one number for each of the 1 channels"),
    ("data.dataset", Missing, {}, r"mine_\w+ cannot be loaded: .*nowhere\.csv not found"),
    ("data.dataset", NoLoad, {}, r"defines load\(self\) -> Arrays"),
    ("data.dataset", MyData, {"path": (str, "x")}, r"called with \(root, download, seed, path=\.\.\.\), but takes"),
    ("data.partition", in_turn, {}, None),
    ("data.partition", twice, {}, r"mine_\w+ did not give 6 one-dimensional arrays .* none of them twice"),
    ("data.partition", nothing, {}, r"mine_\w+ did not give 6"),
    ("data.partition", without_rng, {}, r"called with \(samples, num_clients, rng\), but takes \(samples: "),
    ("model", Net, {}, None),
    ("model", WithPositions, {}, None),
    ("model", Tied, {}, None),
    ("model", NoArguments, {}, r"called with \(input_shape, num_classes\), but takes \(\)"),
    ("model", OtherClasses, {}, r"gives shape \[2, 7\] for 2 samples; allowed is a tensor of shape \[2, 3\]"),
    ("model", OtherImages, {}, r"mine_\w+ cannot be applied to inputs of shape \[1, 8, 8\]"),
    ("model", WithBatchNorm, {}, None),
    ("model", Doubles, {}, "extra has type torch.float64; allowed is torch.float32"),
    ("model", Shapeless, {}, r"has parameters without a shape \(fc\.weight, fc\.bias\).*from input_shape"),
    ("model", a_number, {}, "made a int; allowed is a torch.nn.Module"),
    ("filter", BareFilter, {}, "has no prepare; derive it from"),
    ("filter", NeverCalled, {}, "has no __call__; derive it from"),
    ("filter", Halving, {}, None),
    ("server.filter", BareFilter, {}, "has no prepare; derive it from"),
    ("server.filter", Halving, {}, None),
    ("local.algorithm", BareLocal, {}, "has no own, begin, end; derive it from"),
    ("local.algorithm", MyLocal, {}, None),
    ("local.algorithm", MyLocal, {"mu": (float, 1.0)}, r"called with \(mu=\.\.\.\), but takes \(\)"),
    ("server.aggregator", BareMean, {}, "has no check; derive it from"),
    ("server.aggregator", MyMean, RANK, None),
    ("server.aggregator", JustATensor, {}, r"direction\(\) of JustATensor gave a Tensor; allowed .*Direction"),
    ("server.aggregator", Unknown, {}, r"mine_\w+ needs 'hessian'; allowed: .*sketches, fisher_diagonal"),
    ("server.aggregator", Sketching, {}, "must have the parameters rank, oversampling, power_iterations"),
    ("server.weights", BareWeights, {}, "has no initial_state; derive it from"),
    ("server.weights", MyWeights, {}, None),
    ("server.weights", TensorWeights, {}, r"weigh\(\) of TensorWeights gave a Tensor; allowed .*Weights"),
    ("server.optimizer", BareOptimizer, {}, "has no initial_state; derive it from"),
    ("server.optimizer", MyOptimizer, {}, None),
]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def register(key: str, made: Any, parameters: dict[str, Any]) -> str:
        made = made if isinstance(made, str) else made.__name__
        name = f"mine_{made.lower()}_{len(parameters)}"
        table = methods.FAMILIES[key].table
        monkeypatch.setitem(table, name, None)  # for it to be gone after the test,
        del table[name]  # and not there before
        methods.register(key, name, f"{__name__}:{made}", **parameters)
        return name

    return register


def settings(key: str, name: str, root: Path) -> list[str]:
    if key == "data.dataset":
        return [f"data={{dataset: {name}, root: {root}}}", "data.partition={type: iid, clients: 6}"]
    return [f"{key}={{type: {name}{', clients: 6' if key == 'data.partition' else ''}}}"]


@pytest.mark.parametrize(
    ("key", "made", "parameters", "message"), TABLE, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_family(
    key: str, made: Any, parameters: dict[str, Any], message: str | None, register: Callable[..., str], tmp_path: Path
) -> None:
    config = tiny(settings(key, register(key, made, parameters), tmp_path))
    if message is None:
        model = run_job(config, tmp_path / "run").model
        assert all(bool(tensor.isfinite().all()) for tensor in model.values())
        assert run_job(config, tmp_path / "again").model.keys() == model.keys()
        return
    with pytest.raises((ValueError, NotImplementedError), match=message) as caught:
        run_job(config, tmp_path / "run")
    assert str(caught.value).startswith(key.removesuffix(".dataset"))


def test_a_class_that_is_not_there(register: Callable[..., str], tmp_path: Path) -> None:
    name = register("model", "Nett", {})
    with pytest.raises(ValueError, match=r"^model: .*:Nett could not be loaded .*Nett.*'module:Class'"):
        run_job(tiny([f"model={{type: {name}}}"]), tmp_path)


def test_a_parameter_called_rank_is_nobodys_but_the_aggregators(register: Callable[..., str]) -> None:
    name = register("server.aggregator", MyMean, RANK)
    config = tiny([f"server.aggregator={{type: {name}, rank: 500}}"])
    for num_ranks in (1, 2):
        cut = [cut_columns(c, c.schedule()[0], 100_000, num_ranks, 6) for c in (config, tiny())]
        assert cut[0] == cut[1]


def test_tied_weights_are_one_part_of_the_vector_and_train_together(
    register: Callable[..., str], tmp_path: Path
) -> None:
    name = register("model", Tied, {})
    config = tiny([f"model={{type: {name}}}", "rounds=2"])
    before = build_model(config, load_federation(config, prepares=True).dataset).state_dict()
    after = run_job(config, tmp_path).model
    assert torch.equal(after["first.weight"], after["second.weight"])
    assert not torch.equal(after["first.weight"], before["first.weight"])
    dataset = load_federation(config, prepares=True).dataset
    (layout,) = check_patterns(config, build_model(config, dataset), dataset)
    assert [segment.name for segment in layout.segments] == ["first.weight", "fc.weight", "fc.bias"]


@pytest.mark.parametrize("aggregator", ["{type: fipa, rank: 3, oversampling: 2}", "fisher_diagonal"])
@pytest.mark.parametrize("made", [Tied, WithPositions])
def test_curvature_of_models_with_tied_weights_or_constants(
    aggregator: str, made: type, register: Callable[..., str], tmp_path: Path
) -> None:
    name = register("model", made, {})
    run = run_job(tiny([f"model={{type: {name}}}", f"server.aggregator={aggregator}", "rounds=1"]), tmp_path)
    assert all(bool(tensor.isfinite().all()) for tensor in run.model.values())


def test_constants_of_a_model_stay_as_they_are(register: Callable[..., str], tmp_path: Path) -> None:
    name = register("model", WithPositions, {})
    config = tiny([f"model={{type: {name}}}"])
    before = build_model(config, load_federation(config, prepares=True).dataset)
    after = run_job(config, tmp_path).model
    assert torch.equal(after["positions"], before.positions)
    assert not torch.equal(after["fc.weight"], before.fc.weight)


def test_a_source_of_ones_own_is_known_by_its_content(tmp_path: Path) -> None:
    one, same, other = (MyData(tmp_path, False, seed).fingerprint() for seed in (0, 0, 1))
    assert one == same != other
    assert load(None).data.dataset.type == "digits"


class Errors(Classification):
    """How often it is wrong."""

    headline = ("error", "min")

    def summarize(self, sums: Tensor, num_samples: int) -> dict[str, float]:
        return {"error": 1 - super().summarize(sums, num_samples)["accuracy"]}


class Misnamed(Errors):
    headline = ("mistakes", "min")


class Undirected(Errors):
    headline = "error"  # type: ignore[assignment]


class Short(Errors):
    num_sums = 3


class Tensors(Errors):
    def summarize(self, sums: Tensor, num_samples: int) -> dict[str, float]:
        return {"error": sums[0]}  # type: ignore[dict-item]


class Detached(Errors):
    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().output_loss(outputs, targets).detach()


class Broken(Errors):
    def metrics(self, model: Any, batch: Batch) -> Tensor:
        raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (Short, r"^task: metrics of mine\w+ gave shape \[2\]; allowed is a tensor of shape \[3\], its num_sums"),
        (Tensors, r"^task: summarize of mine\w+ gave a Tensor for error; allowed is a number"),
        (Detached, r"^task: mine\w+ gives a loss for cnn that has no gradient"),
        (Broken, r"^task: metrics of mine\w+ cannot be taken of inputs of shape \[1, 8, 8\] .*: no such thing"),
    ],
)
def test_what_a_task_gives_is_checked_before_the_first_round(
    made: type, problem: str, register: Callable[..., str]
) -> None:
    config = tiny([f"task={register('task', made, {})}"])
    with pytest.raises(ValueError, match=problem):
        build_model(config, load_federation(config, prepares=True).dataset)


class InPlace(nn.Module):
    def __init__(self, freezes: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 3).requires_grad_(not freezes)
        self.first = nn.ReLU(inplace=not freezes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.first(x).flatten(1))
        return scores


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("", r"^model: module or the task changes the samples it is given"),
        (", arguments: {freezes: true}", r"^model: module turns requires_grad off for fc\.weight, which trainable, .*"),
    ],
)
def test_what_a_network_does_unseen_is_refused(settings: str, problem: str) -> None:
    config = tiny([f"model={{type: module, path: '{__name__}:InPlace'{settings}}}"])
    with pytest.raises(ValueError, match=problem):
        build_model(config, load_federation(config, prepares=True).dataset)


@pytest.mark.parametrize(
    ("made", "listed", "problem"),
    [
        (Misnamed, {}, r"^task: mine\w+ counts mistakes, but its `summarize` gives error; let it give"),
        (Undirected, {}, r"^task: mine\w+ has headline 'error'; allowed is a pair such as \('mse', 'min'\)"),
        (Errors, {"headline": ("error", "max")}, r"^task: mine\w+ has headline \('error', 'min'\) in its class and"),
        (Errors, {"headline": ("error", "min")}, ""),
        (Errors, {"metrics": ["error"]}, ""),
        (Errors, {"metrics": ["error", "loss"]}, r"^task: mine\w+ is registered with metrics error, loss, but"),
    ],
)
def test_the_metric_that_counts_in_a_task(
    made: type, listed: dict[str, Any], problem: str, register: Callable[..., str], tmp_path: Path
) -> None:
    config = tiny([f"task={register('task', made, listed)}"])
    if problem:
        with pytest.raises(ValueError, match=problem):
            run_job(config, tmp_path)
    else:
        assert 0 <= run_job(config, tmp_path).records[-1]["test_error"] <= 1
        assert config.headline() == ("test_error", "min")
