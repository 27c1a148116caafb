"""The keys of a config, with their kinds, bounds and defaults. The parameters of methods stand in `methods`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fedspec_dist.config import methods
from fedspec_dist.config.files import dump
from fedspec_dist.config.fingerprint import fingerprint
from fedspec_dist.config.method import (
    LATER,
    MAX_AMOUNT,
    Count,
    CountOrZero,
    Fraction,
    NotNegative,
    Patterns,
    Positive,
    Share,
)
from fedspec_dist.config.section import Choice, Chosen, Section, by_name, choice, defaults_of
from fedspec_dist.config.trees import difference, find, named
from fedspec_dist.config.values import Amount, Participation, PathText, Time, expand_home


class Flip(Choice):
    type: Literal["flip"]


class Crop(Choice):
    type: Literal["crop"]
    padding: Count = 4
    mode: Literal["edge", "zero"] = "edge"


Augment = Annotated[Flip | Crop, Field(discriminator="type"), BeforeValidator(named)]


def _each_once(entries: list[Flip | Crop]) -> list[Flip | Crop]:
    names = [entry.type for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("each of flip and crop at most once")
    return entries


class Data(Section):
    dataset: Annotated[Chosen, choice("data.dataset")] = by_name("digits")
    root: str = "~/.cache/fedspec_dist"
    download: bool = True
    partition: Annotated[Chosen, choice("data.partition")] = by_name("dirichlet")
    augment: Annotated[list[Augment], AfterValidator(_each_once)] = Field([])
    # Of each client's training samples, the share that is kept for validation.
    holdout: Annotated[Fraction, LATER] = 0.0
    # So many groups of equal size, by the target, for partitions and methods that want groups where there are none.
    bins: Annotated[Annotated[int, Field(ge=2, le=1000)] | None, LATER] = None


class Stint(Section):
    """Some epochs in which only the parameters that a glob matches train."""

    epochs: Annotated[int, Field(ge=1, le=MAX_AMOUNT)]
    train: Patterns


class Local(Section):
    algorithm: Annotated[Chosen, choice("local.algorithm")] = by_name("fedavg")
    optimizer: Annotated[Chosen, choice("local.optimizer"), LATER] = by_name("sgd")
    lr: Positive = 0.05
    lr_decay: Share = 1.0
    momentum: Fraction = 0.0
    weight_decay: NotNegative = 0.001
    clip_norm: Positive | None = None
    epochs: Amount = 5
    steps: Amount | None = None
    batch_size: Count = 50
    # The last batch of an epoch, when it is smaller: auto drops one of a single sample where that cannot be normalised.
    drop_last: Annotated[Literal["auto"] | bool, LATER] = "auto"
    schedule: Annotated[list[Stint], Field(max_length=100), LATER] = Field([])
    keep: Annotated[list[str], Field(max_length=1000), LATER] = Field([])  # of what is not shared, what a client keeps


def _listed(value: Any) -> Any:
    """One transform may stand without the list."""
    return [value] if isinstance(value, str | dict) else value


def _no_transform_twice(entries: list[Choice]) -> list[Choice]:
    names = [entry.type for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("each transform at most once")
    return entries


_Transform = Annotated[Chosen, choice("server.transforms")]


class Server(Section):
    shared: Annotated[Patterns, LATER] = Field(["*"])  # of what trains, what is aggregated
    transforms: Annotated[list[_Transform], BeforeValidator(_listed), AfterValidator(_no_transform_twice)] = Field([])
    aggregator: Annotated[Chosen, choice("server.aggregator")] = by_name("fedavg")
    weights: Annotated[Chosen, choice("server.weights")] = by_name("samples")
    filter: Annotated[Chosen, choice("server.filter")] = by_name("none")
    optimizer: Annotated[Chosen, choice("server.optimizer")] = by_name("sgd")


class Clients(Section):
    """Who some of the clients are, whatever the methods."""

    attack: Annotated[Chosen, choice("clients.attack")] = by_name("none")


class Phase(Section):
    """A stretch of rounds with its own methods; complete, so that nothing is looked up elsewhere."""

    rounds: Count
    trainable: Patterns
    local: Local
    filter: Annotated[Chosen, choice("filter")]
    server: Server


class Eval(Section):
    every: Count = 1
    batch_size: Count = 1000
    on: Annotated[list[Literal["global", "clients"]], Field(min_length=1, max_length=2), LATER] = Field(["global"])


class Checkpoint(Section):
    every: Count = 5
    keep: Count = 2


class Tracking(Section):
    tensorboard: bool = False


class Runtime(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    aggregation: Literal["sharded", "gather"] = "sharded"
    executor: Literal["auto", "sequential", "batched"] = "auto"
    clients_per_batch: Annotated[Annotated[int, Field(ge=1, le=10**4)], LATER] = 5  # of the batched executor
    threads_per_rank: Annotated[int, Field(ge=1, le=4096)] = 1
    deterministic: bool = False
    precision: Annotated[Literal["float32", "tf32"], LATER] = "float32"
    dtype: Annotated[Literal["float32", "float64"], LATER] = "float32"
    timeout_s: Annotated[float, Field(gt=0, le=30 * 24 * 3600)] = 600
    on_nonfinite: Literal["raise", "skip"] = "raise"
    sketch_memory_mb: CountOrZero = 1024
    interface: str | None = None  # of the network between hosts


class Cluster(Section):
    """What `launch.submit` asks the scheduler for; has no part in the result."""

    nodes: Count = 1
    gpus_per_node: CountOrZero | None = None
    ranks_per_node: Count | None = None
    cpus_per_rank: Count | None = None
    mem_gb: NotNegative | None = None
    time: Time = "1h"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    array_parallelism: Count | None = None
    extra: dict[str, Any] = Field({})  # any other option of sbatch
    max_requeues: CountOrZero = 10
    requeue_on_failure: CountOrZero = 0
    signal_before_s: CountOrZero = 120


class Init(Section):
    """Where the model starts, instead of random numbers: a run's checkpoint, or a file of weights."""

    run: PathText | None = None
    round: Count | None = None  # of the run; the newest that is there, by default
    weights: PathText | None = None
    strict: bool = True  # every name of the file is in the model, and the other way round

    @model_validator(mode="after")
    def _one_source(self) -> Init:
        if (self.run is None) == (self.weights is None):
            raise ValueError("give one of run and weights")
        return self


class Config(Section):
    """A checked config. `schedule` gives its phases, one when `phases` is empty."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = "digits-specgrad"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    output: PathText = "runs"
    plugins: Annotated[list[str], Field(max_length=100)] = Field([])
    data: Data
    task: Annotated[Chosen, choice("task"), LATER] = by_name("classification")
    model: Annotated[Chosen, choice("model")] = by_name("cnn")
    init: Annotated[Init | None, LATER] = None
    trainable: Patterns = Field(["*"])
    rounds: Count = 20
    clients_per_round: Participation = 5
    sampling: Literal["fixed", "bernoulli"] = "fixed"
    dropout: Fraction = 0.0
    local: Local
    filter: Annotated[Chosen, choice("filter")] = by_name("rfft")
    server: Server
    clients: Clients
    phases: Annotated[list[Phase], Field(max_length=200)] = Field([])
    eval: Eval
    checkpoint: Checkpoint
    tracking: Tracking
    runtime: Runtime
    cluster: Cluster

    def schedule(self) -> list[Phase]:
        if self.phases:
            return list(self.phases)
        sections = {key: getattr(self, key) for key in PHASE_SECTIONS}
        return [Phase.model_construct(rounds=self.rounds, **sections)]

    def headline(self) -> tuple[str, str]:
        """The metric of the task that counts, as metrics.jsonl names it, and whether `max` or `min` is better."""
        name, direction = methods.headline_of(self.task.type)
        return (f"test_{name}" if "global" in self.eval.on else f"client_{name}_mean"), direction

    def cohort_size(self, num_clients: int | None = None) -> int:
        """Clients per round as a count; a share is of all clients, rounded down, at least one.

        How many clients there are, only the data may say (`data.partition.clients: null`).
        """
        if isinstance(self.clients_per_round, int):
            return self.clients_per_round
        return max(1, int(self.clients_per_round * (self.data.partition.clients or num_clients or 0) + 1e-9))

    def mean_cohort(self, num_clients: int | None = None) -> float:
        """Clients per round on average, for sampling that leaves their number to chance."""
        share = self.clients_per_round
        return float(share if isinstance(share, int) else share * (self.data.partition.clients or num_clients or 0))

    def to_dict(self) -> dict[str, Any]:
        """The resolved config in the form in which a file states it."""
        return self.stated()

    def stated(self, context: str | None = None) -> dict[str, Any]:
        resolved = self.model_dump(context=context)
        dataset = resolved["data"].pop("dataset")
        resolved["data"] = {"dataset": dataset.pop("type"), **dataset, **resolved["data"]}
        # As differences: a whole phase would leave nothing for an override of `local` and the like to change.
        resolved["phases"] = [difference(resolved, phase) | {"rounds": phase["rounds"]} for phase in resolved["phases"]]
        return resolved

    def to_yaml(self) -> str:
        return dump(self.to_dict())

    def value(self, dotted: str) -> Any:
        """What the run has at a key, with the methods' defaults and in complete phases; None where there is no such."""
        tree: Any = self.model_dump()
        data = tree["data"]
        tree["data"] = {**data["dataset"], **data, "dataset": data["dataset"]["type"]}
        for part in dotted.split("."):
            if isinstance(tree, list):
                tree = tree[int(part)] if part.isdecimal() and int(part) < len(tree) else None
            else:
                tree = find(tree, [part])
        return tree

    def fingerprint(self) -> str:
        """Eight hex digits of all that decides the result; see `fingerprint.fingerprint`."""
        return fingerprint(self, DEFAULTS)

    def run_folder(self) -> Path:
        return expand_home("output", self.output) / f"{self.name}-{self.fingerprint()}"


# What a phase may override.
PHASE_SECTIONS = tuple(key for key in Phase.model_fields if key != "rounds")

# Methods stand here by their names alone: who names another gets the defaults of the other.
DEFAULTS = defaults_of(Config)
