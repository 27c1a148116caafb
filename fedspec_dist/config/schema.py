"""The config of a run: defaults, then a YAML file, then `key=value` overrides; checked before anything starts.

Nothing here imports torch: a login node validates a config with it. Every problem is a `ConfigError` that names
the dotted key, what was given and what is allowed.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedspec_dist.config import methods
from fedspec_dist.config.files import ConfigError, dump, read, shortened, shown, split
from fedspec_dist.config.methods import LATER, Count, CountOrZero, Family, Fraction, NotNegative, Patterns, Positive
from fedspec_dist.config.overrides import (
    DATA_COMMON,
    FAMILIES,
    PHASE_SECTIONS,
    Typed,
    difference,
    expand_phases,
    find,
    merge,
    named,
    refuse_overruled,
    shown_word,
    split_arguments,
    uniform,
)
from fedspec_dist.config.rules import check_combinations, refuse_unused

__all__ = [
    "DEFAULTS",
    "Config",
    "ConfigError",
    "Local",
    "Phase",
    "Range",
    "expand_home",
    "load",
    "split_arguments",
    "validate",
]

# ------------------------------------------------------------------------------------------ defaults

# Methods by their names alone, whose own defaults stand in `methods`: who names another gets those of the other.
DEFAULTS: dict[str, Any] = {
    "name": "digits-specgrad",
    "seed": 0,
    "output": "runs",
    "plugins": [],
    "data": {
        "dataset": "digits",
        "root": "~/.cache/fedspec_dist",
        "download": True,
        "partition": "dirichlet",
        "augment": [],
        "holdout": 0.0,
        "bins": None,
    },
    "task": "classification",
    "model": "cnn",
    "init": None,
    "trainable": ["*"],
    "rounds": 20,
    "clients_per_round": 5,
    "sampling": "fixed",
    "dropout": 0.0,
    "local": {
        "algorithm": "fedavg",
        "optimizer": "sgd",
        "lr": 0.05,
        "lr_decay": 1.0,
        "momentum": 0.0,
        "weight_decay": 0.001,
        "clip_norm": None,
        "epochs": 5,
        "steps": None,
        "batch_size": 50,
        "drop_last": "auto",
        "schedule": [],
        "keep": [],
    },
    "filter": "rfft",
    "server": {
        "shared": ["*"],
        "transforms": [],
        "aggregator": "fedavg",
        "weights": "samples",
        "filter": "none",
        "optimizer": "sgd",
    },
    "clients": {"attack": "none"},
    "phases": [],
    "eval": {"every": 1, "batch_size": 1000, "on": ["global"]},
    "checkpoint": {"every": 5, "keep": 2},
    "tracking": {"tensorboard": False},
    "runtime": {
        "device": "auto",
        "backend": "auto",
        "aggregation": "sharded",
        "executor": "auto",
        "clients_per_batch": 5,
        "threads_per_rank": 1,
        "deterministic": False,
        "dtype": "float32",
        "precision": "float32",
        "timeout_s": 600,
        "on_nonfinite": "raise",
        "sketch_memory_mb": 1024,
        "interface": None,
    },
    "cluster": {
        "nodes": 1,
        "gpus_per_node": None,
        "ranks_per_node": None,
        "cpus_per_rank": None,
        "mem_gb": None,
        "time": "1h",
        "partition": None,
        "account": None,
        "qos": None,
        "constraint": None,
        "exclude": None,
        "array_parallelism": None,
        "extra": {},
        "max_requeues": 10,
        "requeue_on_failure": 0,
        "signal_before_s": 120,
    },
}

# ------------------------------------------------------------------------------------------ schema


# The context in which a config is written down for its fingerprint: without later options that are at their defaults.
_DECIDING = "deciding"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_serializer(mode="wrap")
    def _serialized(self, whole: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        values: dict[str, Any] = whole(self)
        if info.context != _DECIDING:
            return values
        fields = type(self).model_fields
        later = {
            key
            for key in values
            if LATER in fields[key].metadata and values[key] in (fields[key].default, named(fields[key].default))
        }
        return {key: value for key, value in values.items() if key not in later}


class Choice(Section):
    """A method by its name, with its parameters as further fields."""

    type: str

    def parameters(self, without: Iterable[str] = ()) -> dict[str, Any]:
        return self.model_dump(exclude={"type", *without})


class _ChoiceOf:
    """Checks a bare name, or a mapping with `type`, against the family as it is now: plugins add to the tables."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._models: dict[str, type[Choice]] = {}

    def __call__(self, value: Any) -> Choice:
        value = named(value)
        name = value.get("type") if isinstance(value, dict) else None
        if not isinstance(name, str):
            raise PydanticCustomError("choice_missing", "give a name, or a mapping with a type")
        if name not in self._family.table:
            names = ", ".join(repr(known) for known in self._family.table)
            raise PydanticCustomError("choice_unknown", "allowed: {names}", {"names": names})
        if name not in self._models:
            self._models[name] = create_model(  # type: ignore[call-overload]
                name, __base__=Choice, type=(Literal[name], name), **self._family.parameters(name)
            )
        return self._models[name].model_validate(value)


def _choice(key: str) -> BeforeValidator:
    return BeforeValidator(_ChoiceOf(methods.FAMILIES[key]))


class Flip(Choice):
    type: Literal["flip"]


class Crop(Choice):
    type: Literal["crop"]
    padding: Count = 4
    mode: Literal["edge", "zero"] = "edge"


Augment = Annotated[Flip | Crop, Field(discriminator="type"), BeforeValidator(named)]


def _each_once(entries: list[Any]) -> list[Any]:
    names = [entry.type for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("each of flip and crop at most once")
    return entries


class Data(Section):
    dataset: Annotated[Any, _choice("data.dataset")]
    root: str
    download: bool
    partition: Annotated[Any, _choice("data.partition")]
    augment: Annotated[list[Augment], AfterValidator(_each_once)]
    # Of each client's training samples, the share that is kept for validation.
    holdout: Annotated[Fraction, LATER] = 0.0
    # So many groups of equal size, by the target, for partitions and methods that want groups where there are none.
    bins: Annotated[Annotated[int, Field(ge=2, le=1000)] | None, LATER] = None


class Range(Section):
    """A whole number drawn uniformly for each client and round, both ends included."""

    min: Annotated[int, Field(ge=1, le=methods.MAX_AMOUNT)]
    max: Annotated[int, Field(ge=1, le=methods.MAX_AMOUNT)]

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.min > self.max:
            raise ValueError("min must not be above max")
        return self


def _amount(value: Any) -> Any:
    if isinstance(value, dict):
        return Range.model_validate(value)
    if type(value) is not int or not 1 <= value <= methods.MAX_AMOUNT:
        raise ValueError(f"must be a whole number from 1 to {methods.MAX_AMOUNT}, or {{min: ..., max: ...}}")
    return value


Amount = Annotated[Any, BeforeValidator(_amount)]


class Stint(Section):
    """Some epochs in which only the parameters that a glob matches train."""

    epochs: Annotated[int, Field(ge=1, le=methods.MAX_AMOUNT)]
    train: Patterns


class Local(Section):
    algorithm: Annotated[Any, _choice("local.algorithm")]
    optimizer: Annotated[Any, _choice("local.optimizer"), LATER] = "sgd"
    lr: Positive
    lr_decay: methods.Share
    momentum: Fraction
    weight_decay: NotNegative
    clip_norm: Positive | None
    epochs: Amount
    steps: Amount | None
    batch_size: Count
    # The last batch of an epoch, when it is smaller: auto drops one of a single sample where that cannot be normalised.
    drop_last: Annotated[Literal["auto"] | bool, LATER] = "auto"
    schedule: Annotated[list[Stint], Field(max_length=100), LATER] = []
    keep: Annotated[list[str], Field(max_length=1000), LATER] = []  # of what is not shared, what a client keeps


def _listed(value: Any) -> Any:
    """One transform may stand without the list."""
    return [value] if isinstance(value, str | dict) else value


def _no_transform_twice(entries: list[Any]) -> list[Any]:
    names = [entry.type for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("each transform at most once")
    return entries


_Transform = Annotated[Any, _choice("server.transforms")]


class Server(Section):
    shared: Annotated[Patterns, LATER] = ["*"]  # of what trains, what is aggregated
    transforms: Annotated[list[_Transform], BeforeValidator(_listed), AfterValidator(_no_transform_twice)]
    aggregator: Annotated[Any, _choice("server.aggregator")]
    weights: Annotated[Any, _choice("server.weights")]
    filter: Annotated[Any, _choice("server.filter")]
    optimizer: Annotated[Any, _choice("server.optimizer")]


class Clients(Section):
    """Who some of the clients are, whatever the methods."""

    attack: Annotated[Any, _choice("clients.attack")]


class Phase(Section):
    """A stretch of rounds with its own methods; complete, so that nothing is looked up elsewhere."""

    rounds: Count
    trainable: Patterns
    local: Local
    filter: Annotated[Any, _choice("filter")]
    server: Server


class Eval(Section):
    every: Count
    batch_size: Count
    on: Annotated[list[Literal["global", "clients"]], Field(min_length=1, max_length=2), LATER] = ["global"]


class Checkpoint(Section):
    every: Count
    keep: Count


class Tracking(Section):
    tensorboard: bool


class Runtime(Section):
    device: Literal["auto", "cpu", "cuda"]
    backend: Literal["auto", "gloo", "nccl"]
    aggregation: Literal["sharded", "gather"]
    executor: Literal["auto", "sequential", "batched"]
    clients_per_batch: Annotated[Annotated[int, Field(ge=1, le=10**4)], LATER] = 5  # of the batched executor
    threads_per_rank: Annotated[int, Field(ge=1, le=4096)]
    deterministic: bool
    precision: Annotated[Literal["float32", "tf32"], LATER] = "float32"
    dtype: Annotated[Literal["float32", "float64"], LATER] = "float32"
    timeout_s: Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
    on_nonfinite: Literal["raise", "skip"]
    sketch_memory_mb: CountOrZero
    interface: str | None  # of the network between hosts


_MAX_MINUTES = 10 * 366 * 24 * 60


def minutes(text: str) -> int:
    """A time as `90m`, `4h`, `1d12h` or `HH:MM:SS`, in whole minutes, rounded up.

    Raises:
        ValueError: anything else, or no time at all.
    """
    if clock := re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9}):(\d\d):(\d\d)", text):
        days, hours, mins, seconds = (int(part or 0) for part in clock.groups())
    elif units := re.fullmatch(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?", text):
        days, hours, mins, seconds = *(int(part or 0) for part in units.groups()), 0
    else:
        raise ValueError("must be a time such as 90m, 4h, 1d12h or 04:00:00")
    total = (days * 24 + hours) * 60 + mins + (seconds > 0)
    if not 0 < total <= _MAX_MINUTES:
        raise ValueError("must be a time of at least a minute, and at most ten years")
    return total


def _time(text: str) -> str:
    minutes(text)
    return text


class Cluster(Section):
    """What `launch.submit` asks the scheduler for; has no part in the result."""

    nodes: Count
    gpus_per_node: CountOrZero | None
    ranks_per_node: Count | None
    cpus_per_rank: Count | None
    mem_gb: NotNegative | None
    time: Annotated[str, AfterValidator(_time)]
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    exclude: str | None
    array_parallelism: Count | None
    extra: dict[str, Any]  # any other option of sbatch
    max_requeues: CountOrZero
    requeue_on_failure: CountOrZero
    signal_before_s: CountOrZero


def _path(text: str) -> str:
    """What no file system takes is told here, once, and not by whoever is the first to open it."""
    if len(text.encode()) > 2000 or any(len(part.encode()) > 200 for part in text.split("/")):
        raise ValueError("must be a path of at most 2000 bytes, with names of at most 200")
    return text


def _participation(value: Any) -> Any:
    """A whole number is a count, any other number a share: 1 is one client, 1.0 all of them."""
    if type(value) is int and 1 <= value <= methods.MAX_COUNT:
        return value
    if type(value) is float and 0 < value <= 1:
        return value
    raise ValueError(
        "a count is a whole number from 1, such as 5; a share of all clients is above 0 and at most 1, such as 0.1, or "
        "1.0 for all"
    )


class Init(Section):
    """Where the model starts, instead of random numbers: a run's checkpoint, or a file of weights."""

    run: Annotated[str, AfterValidator(_path)] | None = None
    round: Count | None = None  # of the run; the newest that is there, by default
    weights: Annotated[str, AfterValidator(_path)] | None = None
    strict: bool = True  # every name of the file is in the model, and the other way round

    @model_validator(mode="after")
    def _one_source(self) -> Init:
        if (self.run is None) == (self.weights is None):
            raise ValueError("give one of run and weights")
        return self


class Config(Section):
    """A checked config. `schedule` gives its phases, one when `phases` is empty."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    output: Annotated[str, AfterValidator(_path)]
    plugins: Annotated[list[str], Field(max_length=100)]
    data: Data
    task: Annotated[Any, _choice("task"), LATER] = "classification"
    model: Annotated[Any, _choice("model")]
    init: Annotated[Init | None, LATER] = None
    trainable: Patterns
    rounds: Count
    clients_per_round: Annotated[Any, BeforeValidator(_participation)]
    sampling: Literal["fixed", "bernoulli"]
    dropout: Fraction
    local: Local
    filter: Annotated[Any, _choice("filter")]
    server: Server
    clients: Clients
    phases: Annotated[list[Phase], Field(max_length=200)]
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
        return self._stated()

    def _stated(self, context: str | None = None) -> dict[str, Any]:
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
        """Eight hex digits of all that decides the result.

        Where files lie, what is reported, and how the work is spread do not: a run may go on elsewhere, with
        another time limit, at another number of ranks. Nor does `on_nonfinite`: it decides whether a run goes on,
        and one that ended at a bad client may go on without it. Nor do the names of plugins: what they add is named
        where it is used.
        """
        deciding = self._stated(_DECIDING)
        if self.phases:  # whole ones, and nothing that none of them uses
            deciding["phases"] = [phase.model_dump(context=_DECIDING) for phase in self.phases]
            for key in PHASE_SECTIONS:
                del deciding[key]
        for key in ("name", "output", "checkpoint", "tracking", "cluster"):
            del deciding[key]
        # These came after runs had been made. At what those did they have no part, so that they are found again.
        if self.clients.attack.type == "none":
            del deciding["clients"]
        for part in (deciding, *deciding["phases"]):
            if "server" in part and not part["server"]["transforms"]:
                del part["server"]["transforms"]
        for key in ("root", "download"):
            del deciding["data"][key]
        if self.init is not None and self.init.run is not None:  # wherever the folder lies; its name has a hash
            deciding["init"]["run"] = Path(self.init.run).name
        for key in ("device", "backend", "aggregation", "timeout_s", "on_nonfinite", "interface"):
            del deciding["runtime"][key]
        # These have no part either, but once had one. At their defaults, as in the runs of that time, those are found.
        deciding |= {"eval": {"every": DEFAULTS["eval"]["every"], "batch_size": DEFAULTS["eval"]["batch_size"]}}
        deciding["plugins"] = DEFAULTS["plugins"]
        idle = [] if self._may_sketch() else ["sketch_memory_mb"]
        if self.runtime.executor != "batched":  # the others have the bits of one client after the other
            deciding["runtime"].pop("clients_per_batch", None)
            idle.append("executor")
        for key in idle:
            deciding["runtime"][key] = DEFAULTS["runtime"][key]
        text = json.dumps(deciding, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def _may_sketch(self) -> bool:
        """Whether sketches are used; of methods that a plugin adds this is not known."""
        for server in (phase.server for phase in self.schedule()):
            chosen = [("server.aggregator", server.aggregator), ("server.weights", server.weights)]
            chosen += [("server.transforms", choice) for choice in server.transforms]
            entries = [methods.FAMILIES[key].table[choice.type] for key, choice in chosen]
            if any("sketches" in entry.needs or not entry.is_ours for entry in entries):
                return True
        return False

    def run_folder(self) -> Path:
        return expand_home("output", self.output) / f"{self.name}-{self.fingerprint()}"


def expand_home(key: str, path: str) -> Path:
    """The path with a leading `~` or `~user` replaced.

    Raises:
        ConfigError: there is no such home directory; `key` names the setting.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{key}: got {shown(path)}, but no such home directory is known; give a whole path, or set HOME"
        ) from None


# ------------------------------------------------------------------------------------------ loading


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of a file (the embedded default without one) with `key=value` overrides; imports its plugins.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a wrong value, an impossible combination, an override
            that nothing of the run would heed.
    """
    given = uniform(read(Path(path))) if path is not None else {}
    pairs = [split(override) for override in overrides]
    # First of all: which parameters a method has decides below what becomes of them.
    early: dict[str, Any] = {key: given[key] for key in ("plugins", "model") if key in given}
    _import_plugins(_laid(early, Typed([p for p in pairs if _top(p) in early or _top(p) in ("plugins", "model")])))
    typed = Typed(pairs)
    raw = _laid(given, typed)
    expand_phases(raw, rounds_given="rounds" in given or "rounds" in typed.tree)
    refuse_overruled(raw, typed)
    config = validate(raw)
    refuse_unused(config, typed.keys())
    return config


def _top(pair: tuple[str, Any]) -> str:
    return pair[0].split(".")[0]


def _laid(given: dict[str, Any], typed: Typed) -> dict[str, Any]:
    raw = deepcopy(DEFAULTS)
    merge(raw, given)
    typed.lay_over(raw)
    return raw


def validate(raw: dict[str, Any]) -> Config:
    """Check a complete mapping (defaults merged in).

    Raises:
        ConfigError: naming the keys that are wrong, ten of them at most.
    """
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(item, raw) for item in error.errors(include_url=False)[:_MAX_PROBLEMS]]
        if more := error.error_count() - len(lines):
            lines.append(f"and {more} more")
        raise ConfigError("\n".join(lines)) from None
    check_combinations(config)
    return config


def _import_plugins(raw: dict[str, Any]) -> None:
    """A module adds its own methods to the tables of `fedspec_dist.config.methods` when it is imported.

    In the current folder Python itself looks first or, with PYTHONSAFEPATH, not at all; here it does so last.
    """
    names = raw["plugins"]
    model = named(raw.get("model"))
    by_path = isinstance(model, dict) and model.get("type") == "module"
    if (names or by_path) and os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    for name in names if isinstance(names, list) else []:
        try:
            import_module(str(name))
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {shortened(str(error))}"
            raise ConfigError(
                f"plugins: {shown(name)} could not be imported ({reason}); allowed: modules that python finds, in "
                "the folder from which the command is started or on PYTHONPATH",
                everywhere=False,
            ) from error


# ------------------------------------------------------------------------------------------ messages

_MAX_PROBLEMS = 10


def _explain(item: Any, raw: dict[str, Any]) -> str:
    """One pydantic error as a sentence: the dotted key, what was given, what is allowed."""
    key, kind, context = _dotted(item["loc"]), item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{key}: unknown key{_suggest(key.split('.')[-1], _allowed(item['loc'], raw))}"
    if kind == "model_type":
        return f"{key}: got {shown(item['input'])}; must be a mapping of keys to values"
    if kind == "missing":
        return f"{key}: must be given"
    if kind == "choice_unknown":
        given = item["input"].get("type") if isinstance(item["input"], dict) else item["input"]
        return f"{key}: got {shown(given)}; {item['msg']}"
    if kind in ("union_tag_invalid", "literal_error"):
        allowed = context.get("expected_tags") or context.get("expected", "")
        given = item["input"].get("type") if isinstance(item["input"], dict) else item["input"]
        return f"{key}: got {shown(given)}; allowed: {allowed.replace(' or ', ', ')}"
    if kind == "union_tag_not_found":
        return f"{key}: got {shown(item['input'])}; give a name, or a mapping with a type"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key}: got {shown(item['input'])}; {message}"


def _dotted(location: Sequence[int | str]) -> str:
    """The key as the user writes it: a data set's parameters stand in `data`; augmentations have no tags."""
    parts = [part for part in location if part not in ("flip", "crop")]
    if parts[:2] == ["data", "dataset"] and len(parts) > 2:
        del parts[1]
    return shown_word(".".join(map(str, parts)))


_SECTIONS: dict[tuple[str, ...], type[Section]] = {
    (): Config,
    ("data",): Data,
    ("local",): Local,
    ("server",): Server,
    ("clients",): Clients,
    ("phases",): Phase,
    ("local", "schedule"): Stint,
    ("init",): Init,
    ("eval",): Eval,
    ("checkpoint",): Checkpoint,
    ("tracking",): Tracking,
    ("runtime",): Runtime,
    ("cluster",): Cluster,
}


def _allowed(location: Sequence[int | str], raw: Any) -> list[str]:
    """The keys that are known where an unknown one was found."""
    parents = tuple(part for part in location[:-1] if isinstance(part, str))
    if parents[:1] == ("phases",) and len(parents) > 1:
        parents = parents[1:]
    if parents == ("data", "dataset"):
        return [*DATA_COMMON, *FAMILIES[parents].parameters(named(raw["data"]["dataset"])["type"])]
    if parents in FAMILIES:
        for part in location[:-1]:
            raw = raw if part == 0 and isinstance(raw, dict) else raw[part]  # one transform may stand without the list
        return ["type", *FAMILIES[parents].parameters(named(raw)["type"])]
    return list(_SECTIONS[parents].model_fields) if parents in _SECTIONS else []


def _suggest(key: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(key[:50], allowed, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint or ';'} allowed: {', '.join(allowed)}" if allowed else hint
