"""Every name a config may use: its class, its parameters, their defaults and bounds. No torch.

One line here adds a method. A line names the class by its path, so that a login node can check a config without
importing torch; `build` imports the class when a run needs it. The parameters are the arguments of the class;
a test compares them with its signature.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from fedspec_dist.config.method import (
    LATER,
    MAX_CLIENTS,
    MAX_PARAMETERS,
    MAX_SAMPLES,
    MAX_WIDTH,
    NEEDS,
    TRAITS,
    Classes,
    Count,
    CountOrZero,
    Family,
    Fraction,
    Method,
    NotNegative,
    Number,
    Patterns,
    Positive,
    Share,
    Width,
    method,
    named_by,
)

# What a plugin needs for its own line stands here.
__all__ = [
    "FAMILIES",
    "LATER",
    "NEEDS",
    "TRAITS",
    "Classes",
    "Count",
    "CountOrZero",
    "Family",
    "Fraction",
    "Method",
    "NotNegative",
    "Number",
    "Patterns",
    "Positive",
    "Share",
    "Width",
    "method",
    "named_by",
    "register",
]


def headline_of(task: str) -> tuple[str, str]:
    """The metric of a task that counts, and whether `max` or `min` is better; a user's own may name it in its class.

    Raises:
        ValueError: a user's own has none.
    """
    found: Any = TASKS[task].headline or TASKS[task].load().headline
    if not (isinstance(found, (tuple, list)) and len(found) == 2 and found[1] in ("max", "min")):
        raise ValueError(
            f"task: {task} has headline {found!r}; allowed is a pair such as ('mse', 'min'): the metric that counts, "
            "and whether max or min is better"
        )
    return str(found[0]), str(found[1])


_PartOf = Annotated[float, Field(gt=0, lt=1)]
_Size = Annotated[list[Width], Field(min_length=2, max_length=2)]
_Names = Annotated[list[str], Field(min_length=1, max_length=10_000)]
_Vocabulary = Annotated[int, Field(ge=3, le=MAX_WIDTH)]
_Length = Annotated[int, Field(ge=1, le=10**5)]
# One file that is split, or two.
_FILES: dict[str, tuple[Any, Any]] = dict.fromkeys(("path", "train", "test"), (str | None, None))

DATASETS = {
    "digits": method(".data.images.digits:Digits"),
    "fashion_mnist": method(".data.images.fashion_mnist:FashionMnist"),
    "cifar10": method(".data.images.cifar:Cifar10"),
    "cifar100": method(".data.images.cifar:Cifar100"),
    "npz": method(
        ".data.images.npz:Npz",
        path=(str, ...),
        num_classes=(Classes | None, None),
        renumber=(Annotated[bool, LATER], False),
    ),
    "folder": method(
        ".data.images.folder:Folder",
        path=(str, ...),
        size=(_Size | None, None),
        channels=(Literal[1, 3], 3),
        test_fraction=(_PartOf, 0.2),
    ),
    "torchvision": method(
        ".data.images.torchvision:Torchvision",
        name=(str, ...),
        size=(_Size | None, None),
        arguments=(dict[str, Any] | None, None),
        test_fraction=(_PartOf, 0.2),
    ),
    "csv": method(
        ".data.tables.csv:Csv",
        **_FILES,
        target=(str | _Names, ...),
        features=(_Names | None, None),
        client=(str | None, None),
        kind=(Literal["auto", "classification", "regression"], "auto"),
        test_fraction=(_PartOf, 0.2),
        standardize_target=(bool, False),
    ),
    "text": method(
        ".data.text.text:Text",
        **_FILES,
        text=(str, "text"),
        label=(str, "label"),
        client=(str | None, None),
        target=(Literal["label", "next"], "label"),
        tokenizer=(str, "words"),
        vocabulary_size=(_Vocabulary, 10_000),
        min_count=(Count, 1),
        max_length=(_Length, 128),
        test_fraction=(_PartOf, 0.2),
    ),
    "leaf": method(
        ".data.text.leaf:Leaf",
        path=(str, ...),
        shape=(Annotated[list[Width], Field(min_length=2, max_length=3)] | None, None),
        tokenizer=(Literal["characters", "words"], "characters"),
        vocabulary_size=(_Vocabulary, 10_000),
        max_length=(_Length, 80),
    ),
    "huggingface": method(
        ".data.text.huggingface:HuggingFace",
        path=(str, ...),
        input=(str | None, None),
        label=(str, "label"),
        client=(str | None, None),
        tokenizer=(Literal["words", "characters", "hashing"], "words"),
        vocabulary_size=(_Vocabulary, 10_000),
        max_length=(_Length, 128),
        test_fraction=(_PartOf, 0.2),
    ),
    "synthetic": method(
        ".data.images.synthetic:Synthetic",
        shape=(Annotated[list[Width], Field(min_length=3, max_length=3)], [3, 32, 32]),
        num_classes=(Classes, 10),
        num_train=(Annotated[int, Field(ge=1, le=MAX_SAMPLES)], 5000),
        num_test=(Annotated[int, Field(ge=1, le=MAX_SAMPLES)], 1000),
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
    "natural": method(".data.partitions:natural", clients=(Count | None, None)),  # all that the data set has
}


def _moderate(widths: list[int]) -> list[int]:
    num_weights = sum(a * b for a, b in pairwise(widths))
    if num_weights > MAX_PARAMETERS:
        raise ValueError(f"makes {num_weights} weights between its layers; allowed: at most {MAX_PARAMETERS}")
    return widths


def _importable(path: str) -> str:
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError("must be module:Name, such as my_nets:Net")
    return path


_Norm = Literal["group", "batch", "none"]
_Outputs = Literal["sequence", "tokens"]
_Depth = Annotated[int, Field(ge=1, le=100)]
_DROPOUT: tuple[Any, Any] = (Annotated[Fraction, LATER], 0.0)
MODELS = {
    "mlp": method(
        ".models.small:Mlp",
        hidden=(Annotated[list[Width], Field(max_length=1000), AfterValidator(_moderate)], [200, 200]),
        activation=(Annotated[Literal["relu", "tanh", "gelu"], LATER], "relu"),
        dropout=_DROPOUT,
    ),
    "cnn": method(
        ".models.small:Cnn",
        norm=(_Norm, "group"),
        width=(Annotated[int, Field(ge=2, multiple_of=2, le=2048)], 16),
        dropout=_DROPOUT,
    ),
    "cnn8k": method(".models.small:cnn8k"),
    "cnn23k": method(".models.small:cnn23k"),
    "cnn207k": method(".models.small:cnn207k"),
    "lenet": method(".models.small:LeNet", dropout=_DROPOUT),
    "resnet20": method(".models.resnet:ResNet20", gives={"blocks"}, norm=(_Norm, "group"), dropout=_DROPOUT),
    "resnet18": method(
        ".models.resnet:ResNet18",
        gives={"blocks"},
        norm=(_Norm, "batch"),
        width=(Annotated[int, Field(ge=2, multiple_of=2, le=2048)], 64),
        dropout=_DROPOUT,
    ),
    "vit_small": method(
        ".models.vit:VitSmall",
        patch=(Width, 4),
        width=(Width, 64),
        depth=(_Depth, 4),
        heads=(_Depth, 4),
        dropout=(Fraction, 0.0),
    ),
    "lstm_text": method(
        ".models.text:LstmText",
        needs={"tokens"},
        embedding=(Width, 64),
        hidden=(Width, 128),
        layers=(_Depth, 1),
        dropout=(Fraction, 0.0),
        outputs=(_Outputs, "sequence"),
    ),
    "transformer_text": method(
        ".models.text:TransformerText",
        needs={"tokens"},
        width=(Width, 64),
        depth=(_Depth, 2),
        heads=(_Depth, 4),
        dropout=(Fraction, 0.0),
        outputs=(_Outputs, "sequence"),
        tie_embeddings=(bool, False),
    ),
    "torchvision": method(
        ".models.imported:torchvision",
        gives={"blocks"},
        name=(str, ...),
        norm=(Literal["batch", "group"], "batch"),
        stem=(Literal["cifar", "imagenet"], "imagenet"),
        pretrained=(str | None, None),
    ),
    "module": method(
        ".models.imported:module",
        gives={"blocks"},
        path=(Annotated[str, AfterValidator(_importable)], ...),
        arguments=(dict[str, Any] | None, None),
    ),
}

# What is learned: the loss, the metrics, and the curvature in the model's outputs.
TASKS = {
    "classification": method(
        ".tasks.classification:Classification",
        gives={"classes"},
        headline=("accuracy", "max"),
        metrics=["loss", "accuracy"],
    ),
    "regression": method(".tasks.regression:Regression", headline=("mse", "min"), metrics=["mse", "mae", "r2"]),
    "language": method(
        ".tasks.language:Language",
        gives={"classes"},
        headline=("accuracy", "max"),
        metrics=["loss", "accuracy", "perplexity"],
        ignore_index=(Annotated[int, Field(ge=-(2**31), lt=0)], -100),
    ),
}

# The end of a local step.
_ADAM: dict[str, tuple[Any, Any]] = {
    "beta1": (Fraction, 0.9),
    "beta2": (Fraction, 0.999),
    "epsilon": (Positive, 1e-8),
}
LOCAL_OPTIMIZERS = {
    "sgd": method(".clients.optimizers:LocalSgd"),
    "adam": method(".clients.optimizers:LocalAdam", traits={"equal_steps"}, **_ADAM),
    "adamw": method(".clients.optimizers:LocalAdamW", traits={"equal_steps"}, **_ADAM),
}

LOCAL_ALGORITHMS = {
    "fedavg": method(".clients.algorithms.base:FedAvg", traits={"only_updates"}),
    "fedprox": method(".clients.algorithms.proximal:FedProx", traits={"only_updates", "pulls"}, mu=(NotNegative, 0.01)),
    "fednova": method(".clients.algorithms.proximal:FedNova", traits={"counts_steps", "pulls"}, mu=(NotNegative, 0.0)),
    "scaffold": method(
        ".clients.algorithms.controls:Scaffold", traits={"server_half", "counts_steps"}, option=(Literal[1, 2], 2)
    ),
    "feddyn": method(
        ".clients.algorithms.proximal:FedDyn", traits={"server_half", "sums_drift"}, alpha=(NotNegative, 0.1)
    ),
    "feddc": method(
        ".clients.algorithms.controls:FedDC",
        traits={"server_half", "sums_drift", "counts_steps"},
        alpha=(NotNegative, 0.01),
    ),
    "fedcm": method(".clients.algorithms.sharpness:FedCM", traits={"server_half", "counts_steps"}, alpha=(Share, 0.1)),
    "fedsam": method(
        ".clients.algorithms.sharpness:FedSAM",
        traits={"only_updates"},
        rho=(NotNegative, 0.1),
        adaptive=(bool, False),
        eta=(NotNegative, 0.2),
        filter_ascent=(Annotated[bool, LATER], False),
    ),
    "mofedsam": method(
        ".clients.algorithms.sharpness:MoFedSAM",
        traits={"server_half", "counts_steps"},
        alpha=(Share, 0.1),
        rho=(NotNegative, 0.1),
        filter_ascent=(Annotated[bool, LATER], False),
    ),
    "fedlc": method(
        ".clients.algorithms.losses:FedLC",
        traits={"only_updates"},
        needs={"classes"},
        tau=(NotNegative, 1.0),
        denominator=(Literal["all", "others"], "all"),
    ),
    "feddecorr": method(
        ".clients.algorithms.losses:FedDecorr", traits={"only_updates"}, needs={"features"}, beta=(NotNegative, 0.1)
    ),
    "moon": method(
        ".clients.algorithms.losses:Moon",
        traits={"only_updates"},
        needs={"features"},
        mu=(NotNegative, 5.0),
        temperature=(Positive, 0.5),
    ),
    "fedrcl": method(
        ".clients.algorithms.fedrcl:FedRCL",
        traits={"only_updates"},
        needs={"classes", "features"},
        temperature=(Positive, 0.05),
        threshold=(Annotated[float, Field(ge=-1, le=1)], 0.7),
        contrast_weight=(NotNegative, 1.0),
        relaxation_weight=(NotNegative, 1.0),
    ),
}


def _digits(order: Any) -> Any:
    # YAML reads 3120 as a number; 0123 is a word to the config's reader.
    return str(order) if type(order) is int and order >= 1000 else order


def _axis_order(order: str) -> str:
    if order != "random" and sorted(order) != list("0123"):
        raise ValueError("must be a permutation of 0123, or random")
    return order


def _is_point(point: Any) -> bool:
    is_pair = isinstance(point, list) and len(point) == 2 and type(point[0]) is int and type(point[1]) in (int, float)
    return is_pair and 0 <= point[1] < 1


def _increasing(schedule: list[Any]) -> list[Any]:
    are_points = len(schedule) > 0 and all(_is_point(point) for point in schedule)
    if not are_points or not all(a < b for a, b in pairwise([0, *(point[0] for point in schedule)])):
        raise ValueError(
            "must be [round, ratio] pairs, with increasing rounds from 1 on and ratios of at least 0 and below 1"
        )
    return schedule


# Of the filters that see a layer as a signal.
_SIGNAL: dict[str, tuple[Any, Any]] = {
    "ratio": (Fraction, 0.05),
    "order": (Annotated[str, BeforeValidator(_digits), AfterValidator(_axis_order)], "0123"),
    "schedule": (Annotated[list[Any], Field(max_length=1000), AfterValidator(_increasing)] | None, None),
}
FILTERS = {
    "none": method(".filters.identity:Identity"),
    "rfft": method(".filters.spectral:HighPass", **_SIGNAL),
    "rfft_high": method(".filters.spectral:LowPass", **_SIGNAL),
    "random": method(".filters.ablations:RandomSuppression", **_SIGNAL),
    "l2_rescale": method(".filters.ablations:L2Rescale", **_SIGNAL),
    "lapd": method(".filters.detrend:LapD", **_SIGNAL),
    "gaussian": method(".filters.detrend:Gaussian", **_SIGNAL),
    "gradient_centralization": method(".filters.centralization:GradientCentralization"),
}

# What servers' methods may ask of clients besides their updates, by their `needs`; no key of the config chooses one.
# Their parameters are those that the method which asks has under the same names.
STATISTICS = {
    "sketches": method(
        ".clients.statistics.derivatives:Sketches",
        needs={"curvature"},
        rank=(Count, ...),
        oversampling=(CountOrZero, ...),
        power_iterations=(CountOrZero, ...),
    ),
    "fisher_diagonal": method(".clients.statistics.derivatives:FisherDiagonal", needs={"curvature"}),
    "gradient": method(".clients.statistics.derivatives:Gradient"),
    "mean_features": method(".clients.statistics.mean_features:MeanFeatures", needs={"features"}),
    "class_features": method(".clients.statistics.mean_features:ClassFeatures", needs={"classes", "features"}),
}
AGGREGATORS = {
    "fedavg": method(".server.aggregators.means:FedAvg"),
    "fedgh": method(".server.aggregators.fedgh:FedGH", mode=(Literal["pairwise", "snapshot"], "pairwise")),
    "fipa": method(
        ".server.aggregators.fipa:Fipa",
        needs={"sketches"},
        rank=(Count, 20),
        oversampling=(CountOrZero, 10),
        power_iterations=(CountOrZero, 2),
        damping=(NotNegative, 0.5),
        step=(Positive, 0.5),
        convention=(Literal["released", "exact"], "released"),
        merge=(Literal["gram", "tsqr"], "gram"),
    ),
    "fednova": method(".server.aggregators.means:FedNova", traits={"counts_steps"}),
    "fedlws": method(
        ".server.aggregators.fedlws:FedLws",
        traits={"shrinks"},
        beta=(NotNegative, 0.03),
        min_tau=(NotNegative, 0.01),
        max_tau=(NotNegative, 0.2),
    ),
    "inco": method(".server.aggregators.inco:InCo", needs={"blocks"}, clamp_max=(NotNegative, 5.0)),
    "fisher_diagonal": method(".server.aggregators.means:FisherDiagonal", needs={"fisher_diagonal"}),
    "median": method(".server.aggregators.robust:Median", traits={"ignores_weights"}),
    "trimmed_mean": method(
        ".server.aggregators.robust:TrimmedMean",
        traits={"ignores_weights"},
        trim=(Annotated[float, Field(ge=0, lt=0.5)], 0.1),
    ),
    "krum": method(
        ".server.aggregators.robust:Krum",
        traits={"ignores_weights"},
        byzantine=(Annotated[float, Field(ge=0, lt=0.5)], 0.2),
    ),
    "multi_krum": method(
        ".server.aggregators.robust:MultiKrum",
        traits={"ignores_weights"},
        byzantine=(Annotated[float, Field(ge=0, lt=0.5)], 0.2),
        keep=(Count | None, None),
    ),
    "geometric_median": method(
        ".server.aggregators.robust:GeometricMedian",
        smoothing=(Positive, 1e-6),
        iterations=(Count, 100),
    ),
    "centered_clipping": method(
        ".server.aggregators.robust:CenteredClipping", radius=(Positive, 1.0), iterations=(Count, 1)
    ),
}

# What happens to the updates before they are aggregated: a list of these, in order.
TRANSFORMS = {
    "clip": method(".server.transforms.privacy:Clip", norm=(Positive, 1.0)),
    "fedgh": method(".server.transforms.fedgh:Harmonize", mode=(Literal["pairwise", "snapshot"], "pairwise")),
    "noise": method(
        ".server.transforms.privacy:Noise",
        multiplier=(NotNegative, 1.0),
        delta=(Annotated[float, Field(gt=0, lt=1)] | None, None),
    ),
}

WEIGHTS = {
    "uniform": method(".server.weights.shares:Uniform"),
    "samples": method(".server.weights.shares:Samples"),
    "feddisco": method(
        ".server.weights.feddisco:FedDisco",
        traits={"own_weights"},
        needs={"classes"},
        a=(NotNegative, 0.5),
        b=(Number, 0.1),
        metric=(Literal["kl", "l2", "l1", "cosine", "only_iid"], "kl"),
        target=(Annotated[Literal["uniform", "test"], LATER], "uniform"),
    ),
    "fedawa": method(
        ".server.weights.fedawa:FedAwa",
        traits={"own_weights", "from_updates"},
        optimizer=(Literal["adam", "sgd"], "adam"),
        lr=(Positive | None, None),
        weight_decay=(NotNegative | None, None),
        server_epochs=(CountOrZero, 1),
        stale=(bool, False),
    ),
    "fedlaw": method(
        ".server.weights.fedlaw:FedLaw",
        needs={"proxy"},
        traits={"own_weights", "from_updates", "shrinks"},
        epochs=(CountOrZero, 20),
        lr=(Positive, 0.01),
        batch_size=(Count, 128),
        proxy_fraction=(Annotated[float, Field(gt=0, lt=1)], 0.02),
    ),
}

_DECAYING: dict[str, tuple[Any, Any]] = {
    "beta1": (Fraction, 0.9),
    "beta2": (Annotated[float, Field(ge=0, le=1)], 0.99),
    "tau": (Positive, 0.001),
    "initial_accumulator": (NotNegative | None, None),
}
SERVER_OPTIMIZERS = {
    "sgd": method(".server.optimizers:Sgd", lr=(Positive, 1.0)),
    "momentum": method(".server.optimizers:Momentum", traits={"remembers"}, lr=(Positive, 1.0), beta=(Fraction, 0.9)),
    "adagrad": method(
        ".server.optimizers:Adagrad",
        traits={"remembers"},
        lr=(Positive, 0.1),
        beta1=(Fraction, 0.0),
        tau=(Positive, 0.01),
        initial_accumulator=(NotNegative | None, None),
    ),
    "adam": method(".server.optimizers:Adam", traits={"remembers"}, lr=(Positive, 0.01), **_DECAYING),
    "yogi": method(".server.optimizers:Yogi", traits={"remembers"}, lr=(Positive, 0.01), **_DECAYING),
}

# What malicious clients do, for studies of how servers bear them.
ATTACKS = {
    "none": method(".clients.attacks:Attack"),
    "label_flip": method(".clients.attacks:LabelFlip", needs={"classes"}),
    "sign_flip": method(".clients.attacks:SignFlip", factor=(Positive, 1.0)),
    "scale": method(".clients.attacks:Scale", factor=(Positive, 10.0)),
    "gaussian": method(".clients.attacks:Gaussian", std=(Positive, 1.0)),
}

# Parameters that every method of a family has; they outlive a change of `type` in an override.
PARTITION_COMMON: dict[str, tuple[Any, Any]] = {"clients": (Annotated[int, Field(ge=1, le=MAX_CLIENTS)], 20)}
MODEL_COMMON: dict[str, tuple[Any, Any]] = {
    "projection": (Width | None, None),
    "buffers": (Annotated[Literal["aggregate", "local", "freeze"], LATER], "aggregate"),
}
FILTER_COMMON: dict[str, tuple[Any, Any]] = {
    "layers": (Patterns, ["*"]),
    "min_size": (CountOrZero, 0),
    "min_dim": (Annotated[Count, LATER], 1),
}
ATTACK_COMMON: dict[str, tuple[Any, Any]] = {"fraction": (Fraction, 0.2)}


FAMILIES = {
    "data.dataset": Family(DATASETS, {}),
    "data.partition": Family(PARTITIONS, PARTITION_COMMON),
    "task": Family(TASKS, {}),
    "model": Family(MODELS, MODEL_COMMON),
    "filter": Family(FILTERS, FILTER_COMMON),
    "local.algorithm": Family(LOCAL_ALGORITHMS, {}),
    "local.optimizer": Family(LOCAL_OPTIMIZERS, {}),
    "server.transforms": Family(TRANSFORMS, {}),
    "server.aggregator": Family(AGGREGATORS, {}),
    "server.weights": Family(WEIGHTS, {}),
    "server.filter": Family(FILTERS, FILTER_COMMON),
    "server.optimizer": Family(SERVER_OPTIMIZERS, {}),
    "clients.attack": Family(ATTACKS, ATTACK_COMMON),
}


def register(
    key: str,
    name: str,
    target: str,
    /,
    *,
    needs: Iterable[str] = (),
    gives: Iterable[str] = (),
    traits: Iterable[str] = (),
    headline: tuple[str, str] | None = None,
    metrics: Iterable[str] = (),
    **parameters: tuple[Any, Any],
) -> None:
    """Add a method of a user's own, from a module that the config names in `plugins`.

    `register("local.algorithm", "mine", "my_package.mine:Mine", mu=(Positive, 0.1))` makes
    `local.algorithm: {type: mine, mu: 0.2}` known. `key` is one of `FAMILIES`, or `statistics`, of which server methods
    name what they need; `needs`, and of a task or a model `gives`, are words of `NEEDS`, `traits` of `TRAITS`. With a
    task's `headline` and `metrics` here, too, sweeps on a machine without torch know them.

    Raises:
        ValueError: there is no such family, no such word, or another method has the name.
    """
    tables = {**{family: row.table for family, row in FAMILIES.items()}, "statistics": STATISTICS}
    if key not in tables:
        raise ValueError(f"register: no family {key!r}; there are: {', '.join(tables)}")
    line = method(target, needs=needs, gives=gives, traits=traits, headline=headline, metrics=metrics, **parameters)
    added = replace(line, key=key)
    for kind, given in (("needs", added.needs), ("gives", added.gives), ("traits", added.traits)):
        known = [*TRAITS] if kind == "traits" else [*NEEDS, *STATISTICS]
        if unknown := sorted(given - set(known)):
            raise ValueError(f"register: {key} {name!r} {kind} {unknown[0]!r}; allowed: {', '.join(known)}")
    table = tables[key]
    if table.setdefault(name, added).target != target:
        raise ValueError(f"register: {key} {name!r} is taken by {table[name].target}; choose another name")
