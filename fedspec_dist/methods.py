"""Every name a config may use: its class, its parameters, their defaults and bounds. No torch.

One line here adds a method. A line names the class by its path, so that a login node can check a config without
importing torch; `build` imports the class when a run needs it. The parameters are the arguments of the class;
a test compares them with its signature.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Patterns = Annotated[list[str], Field(min_length=1)]


@dataclass(frozen=True)
class Method:
    """`target` is `module:Class`, the module's name starting with a dot when it is of this package; `parameters` maps
    a name to `(type with bounds, default)`."""

    target: str
    parameters: dict[str, tuple[Any, Any]]

    def load(self) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(import_module(module, "fedspec_dist"), name)

    def build(self, *arguments: Any, **parameters: Any) -> Any:
        """Call the class (or, for partitions and weights, the function) that the line names."""
        return self.load()(*arguments, **parameters)


def method(target: str, **parameters: tuple[Any, Any]) -> Method:
    return Method(target, parameters)


DATASETS = {
    "digits": method(".data.digits:Digits"),
    "fashion_mnist": method(".data.fashion_mnist:FashionMnist"),
    "cifar10": method(".data.cifar:Cifar10"),
    "cifar100": method(".data.cifar:Cifar100"),
    "npz": method(".data.npz:Npz", path=(str, ...), num_classes=(Annotated[int, Field(ge=2)] | None, None)),
    "synthetic": method(
        ".data.synthetic:Synthetic",
        shape=(Annotated[list[Count], Field(min_length=3, max_length=3)], [3, 32, 32]),
        num_classes=(Annotated[int, Field(ge=2)], 10),
        num_train=(Count, 5000),
        num_test=(Count, 1000),
    ),
}

PARTITIONS = {
    "iid": method(".data.partitions:iid"),
    "shards": method(".data.partitions:shards", shards_per_client=(Count, 2)),
    "pathological": method(".data.partitions:pathological", classes_per_client=(Count, 2)),
    "quantity_skew": method(".data.partitions:quantity_skew", sigma=(NotNegative, 1.0), min_size=(CountOrZero, 1)),
    "dirichlet": method(
        ".data.partitions:dirichlet", alpha=(Positive, 0.1), min_size=(CountOrZero, 10), max_tries=(Count, 1000)
    ),
    "dirichlet_uncapped": method(
        ".data.partitions:dirichlet_uncapped",
        alpha=(Positive, 0.1),
        min_size=(CountOrZero, 0),
        max_tries=(Count, 1000),
    ),
    "dirichlet_balanced": method(".data.partitions:dirichlet_balanced", alpha=(Positive, 0.1)),
    "natural": method(".data.partitions:natural"),
}

_Norm = Literal["group", "none"]
MODELS = {
    "mlp": method(".models.mlp:Mlp", hidden=(list[Count], [200, 200])),
    "cnn": method(".models.cnn:Cnn", norm=(_Norm, "group"), width=(Annotated[int, Field(ge=2, multiple_of=2)], 16)),
    "cnn8k": method(".models.fipa_cnn:cnn8k"),
    "cnn23k": method(".models.fipa_cnn:cnn23k"),
    "cnn207k": method(".models.fipa_cnn:cnn207k"),
    "lenet": method(".models.lenet:LeNet"),
    "resnet20": method(".models.resnet:ResNet20", norm=(_Norm, "group")),
}

LOCAL_ALGORITHMS = {
    "fedavg": method(".clients.algorithms.fedavg:FedAvg"),
    "fedprox": method(".clients.algorithms.fedprox:FedProx", mu=(NotNegative, 0.01)),
    "fednova": method(".clients.algorithms.fednova:FedNova", mu=(NotNegative, 0.0)),
    "scaffold": method(".clients.algorithms.scaffold:Scaffold", option=(Literal[1, 2], 2)),
    "feddyn": method(".clients.algorithms.feddyn:FedDyn", alpha=(NotNegative, 0.1)),
    "feddc": method(".clients.algorithms.feddc:FedDC", alpha=(NotNegative, 0.01)),
    "fedcm": method(".clients.algorithms.fedcm:FedCM", alpha=(Annotated[float, Field(gt=0, le=1)], 0.1)),
    "fedsam": method(
        ".clients.algorithms.fedsam:FedSAM", rho=(NotNegative, 0.1), adaptive=(bool, False), eta=(NotNegative, 0.2)
    ),
    "mofedsam": method(
        ".clients.algorithms.mofedsam:MoFedSAM",
        alpha=(Annotated[float, Field(gt=0, le=1)], 0.1),
        rho=(NotNegative, 0.1),
    ),
    "fedlc": method(
        ".clients.algorithms.fedlc:FedLC", tau=(NotNegative, 1.0), denominator=(Literal["all", "others"], "all")
    ),
    "feddecorr": method(".clients.algorithms.feddecorr:FedDecorr", beta=(NotNegative, 0.1)),
    "moon": method(".clients.algorithms.moon:Moon", mu=(NotNegative, 5.0), temperature=(Positive, 0.5)),
    "fedrcl": method(
        ".clients.algorithms.fedrcl:FedRCL",
        temperature=(Positive, 0.05),
        threshold=(Annotated[float, Field(ge=-1, le=1)], 0.7),
        contrast_weight=(NotNegative, 1.0),
        relaxation_weight=(NotNegative, 1.0),
    ),
}

FILTERS = {
    "none": method(".filters.identity:Identity"),
    "rfft": method(".filters.spectral:HighPass", ratio=(Fraction, 0.05)),
}

AGGREGATORS = {
    "fedavg": method(".server.fedavg:FedAvg"),
    "fedgh": method(".server.fedgh:FedGH", mode=(Literal["pairwise", "snapshot"], "pairwise")),
    "fipa": method(
        ".server.fipa:Fipa",
        rank=(Count, 20),
        oversampling=(CountOrZero, 10),
        power_iterations=(CountOrZero, 2),
        damping=(NotNegative, 0.5),
        step=(Positive, 0.5),
        convention=(Literal["released", "exact"], "released"),
        merge=(Literal["gram", "tsqr"], "gram"),
    ),
}

WEIGHTS = {
    "uniform": method(".server.weights:uniform"),
    "samples": method(".server.weights:samples"),
}

SERVER_OPTIMIZERS = {
    "sgd": method(".server.optimizers:Sgd", lr=(Positive, 1.0)),
}

# Parameters that every method of a family has; they outlive a change of `type` in an override.
PARTITION_COMMON: dict[str, tuple[Any, Any]] = {"clients": (Count, 20)}
MODEL_COMMON: dict[str, tuple[Any, Any]] = {"projection": (Count | None, None)}
FILTER_COMMON: dict[str, tuple[Any, Any]] = {"layers": (Patterns, ["*"])}
