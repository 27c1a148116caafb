"""The config of a run: defaults, then a YAML file, then `key=value` overrides; checked before anything starts.

Nothing here imports torch: a login node validates a config with it. Every problem is a `ConfigError` that names
the dotted key, what was given and what is allowed.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from fedspec_dist import methods
from fedspec_dist.methods import Count, CountOrZero, NotNegative, Patterns, Positive


class ConfigError(ValueError):
    """A config that cannot run; the message is for the person who typed it."""


# ------------------------------------------------------------------------------------------ defaults

DEFAULTS: dict[str, Any] = {
    "name": "digits-specgrad",
    "seed": 0,
    "output": "runs",
    "data": {
        "dataset": "digits",
        "root": "~/.cache/fedspec_dist",
        "download": True,
        "partition": {"type": "dirichlet", "alpha": 0.1, "clients": 20},
        "augment": [],
    },
    "model": {"type": "cnn", "norm": "group"},
    "trainable": ["*"],
    "rounds": 20,
    "clients_per_round": 5,
    "local": {
        "algorithm": "fedavg",
        "lr": 0.05,
        "lr_decay": 1.0,
        "momentum": 0.0,
        "weight_decay": 0.001,
        "clip_norm": None,
        "epochs": 5,
        "batch_size": 50,
    },
    "filter": {"type": "rfft", "ratio": 0.05, "layers": ["*"]},
    "server": {"aggregator": "fedavg", "weights": "samples", "optimizer": {"type": "sgd", "lr": 1.0}},
    "phases": [],
    "eval": {"every": 1, "batch_size": 1000},
    "checkpoint": {"every": 5, "keep": 2},
    "tracking": {"tensorboard": False},
    "runtime": {
        "device": "auto",
        "backend": "auto",
        "aggregation": "sharded",
        "executor": "auto",
        "threads_per_rank": 1,
        "deterministic": False,
        "timeout_s": 600,
        "on_nonfinite": "raise",
        "sketch_memory_mb": 1024,
    },
}

# What a phase may override.
PHASE_SECTIONS = ("trainable", "local", "filter", "server")

# Keys of `data` that belong to every data set; the others are parameters of the one that is named.
_DATA_COMMON = ("dataset", "root", "download", "partition", "augment")


# ------------------------------------------------------------------------------------------ schema


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Choice(Section):
    """A method by its name, with its parameters as further fields."""

    type: str

    def parameters(self, without: Iterable[str] = ()) -> dict[str, Any]:
        return self.model_dump(exclude={"type", *without})


def _named(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


def _choice(table: Mapping[str, methods.Method], common: Mapping[str, tuple[Any, Any]] | None = None) -> Any:
    """The field type of one family: a bare name, or a mapping with `type` and that method's parameters."""
    variants = tuple(
        create_model(  # type: ignore[call-overload]
            name, __base__=Choice, type=(Literal[name], name), **(common or {}), **entry.parameters
        )
        for name, entry in table.items()
    )
    union = Union[variants] if len(variants) > 1 else variants[0]  # noqa: UP007 - built from a tuple
    return Annotated[union, Field(discriminator="type"), BeforeValidator(_named)]


if TYPE_CHECKING:  # the unions are made at run time; to a type checker their members are of any kind
    Dataset: TypeAlias = Any
    Partition: TypeAlias = Any
    Model: TypeAlias = Any
    LocalAlgorithm: TypeAlias = Any
    Filter: TypeAlias = Any
    Aggregator: TypeAlias = Any
    Weights: TypeAlias = Any
    ServerOptimizer: TypeAlias = Any
else:
    Dataset = _choice(methods.DATASETS)
    Partition = _choice(methods.PARTITIONS, methods.PARTITION_COMMON)
    Model = _choice(methods.MODELS)
    LocalAlgorithm = _choice(methods.LOCAL_ALGORITHMS)
    Filter = _choice(methods.FILTERS, methods.FILTER_COMMON)
    Aggregator = _choice(methods.AGGREGATORS)
    Weights = _choice(methods.WEIGHTS)
    ServerOptimizer = _choice(methods.SERVER_OPTIMIZERS)


class Flip(Choice):
    type: Literal["flip"]


class Crop(Choice):
    type: Literal["crop"]
    padding: Count = 4
    mode: Literal["edge", "zero"] = "edge"


Augment = Annotated[Flip | Crop, Field(discriminator="type"), BeforeValidator(_named)]


def _gather_dataset(value: Any) -> Any:
    """Move the data set's own parameters, which stand beside `dataset` in the file, under its name."""
    if not isinstance(value, dict):
        return value
    common = {key: value[key] for key in _DATA_COMMON if key in value}
    own = {key: value[key] for key in value if key not in _DATA_COMMON}
    dataset = _named(common.get("dataset", {}))
    return common | {"dataset": dataset | own if isinstance(dataset, dict) else dataset}


def _each_once(entries: list[Any]) -> list[Any]:
    names = [entry.type for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("each of flip and crop at most once")
    return entries


class DataFields(Section):
    dataset: Dataset
    root: str
    download: bool
    partition: Partition
    augment: Annotated[list[Augment], AfterValidator(_each_once)]


Data = Annotated[DataFields, BeforeValidator(_gather_dataset)]


class Local(Section):
    algorithm: LocalAlgorithm
    lr: Positive
    lr_decay: Annotated[float, Field(gt=0, le=1)]
    momentum: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: NotNegative
    clip_norm: Positive | None
    epochs: Count
    batch_size: Count


class Server(Section):
    aggregator: Aggregator
    weights: Weights
    optimizer: ServerOptimizer


class Phase(Section):
    """A stretch of rounds with its own methods; complete, so that nothing is looked up elsewhere."""

    rounds: Count
    trainable: Patterns
    local: Local
    filter: Filter
    server: Server


class Eval(Section):
    every: Count
    batch_size: Count


class Checkpoint(Section):
    every: Count
    keep: Count


class Tracking(Section):
    tensorboard: bool


class Runtime(Section):
    device: Literal["auto", "cpu", "cuda"]
    backend: Literal["auto", "gloo", "nccl"]
    aggregation: Literal["sharded", "gather"]
    executor: Literal["auto", "sequential"]
    threads_per_rank: Count
    deterministic: bool
    timeout_s: Positive
    on_nonfinite: Literal["raise", "skip"]
    sketch_memory_mb: CountOrZero


def _participation(value: float) -> float:
    if value >= 1 and value != int(value):
        raise ValueError("a count is a whole number; a fraction is below 1")
    return value


class Config(Section):
    """A checked config. `schedule` gives its phases, one when `phases` is empty."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: CountOrZero
    output: str
    data: Data
    model: Model
    trainable: Patterns
    rounds: Count
    clients_per_round: Annotated[float, Field(gt=0), AfterValidator(_participation)]
    local: Local
    filter: Filter
    server: Server
    phases: list[Phase]
    eval: Eval
    checkpoint: Checkpoint
    tracking: Tracking
    runtime: Runtime

    def schedule(self) -> list[Phase]:
        if self.phases:
            return list(self.phases)
        sections = {key: getattr(self, key) for key in PHASE_SECTIONS}
        return [Phase.model_construct(rounds=self.rounds, **sections)]

    def cohort_size(self) -> int:
        """Clients per round as a count; a fraction is of all clients, rounded down, at least one."""
        if self.clients_per_round >= 1:
            return int(self.clients_per_round)
        return max(1, int(self.clients_per_round * self.data.partition.clients + 1e-9))

    def to_dict(self) -> dict[str, Any]:
        """The resolved config in the form in which a file states it."""
        resolved = self.model_dump()
        dataset = resolved["data"].pop("dataset")
        resolved["data"] = {"dataset": dataset.pop("type"), **dataset, **resolved["data"]}
        if resolved["clients_per_round"] >= 1:
            resolved["clients_per_round"] = int(resolved["clients_per_round"])
        return resolved

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, width=110)

    def fingerprint(self) -> str:
        """Eight hex digits of all that decides the result.

        Where files lie, what is reported, and how the work is spread do not: a run may go on elsewhere, with
        another time limit, at another number of ranks. Nor does `on_nonfinite`: it decides whether a run goes on,
        and one that ended at a bad client may go on without it.
        """
        deciding = self.to_dict()
        for key in ("name", "output", "checkpoint", "tracking"):
            del deciding[key]
        for key in ("root", "download"):
            del deciding["data"][key]
        for key in ("device", "backend", "aggregation", "timeout_s", "on_nonfinite"):
            del deciding["runtime"][key]
        text = json.dumps(deciding, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

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
            f"{key}: got {path!r}, but no such home directory is known; give a whole path, or set HOME"
        ) from None


# ------------------------------------------------------------------------------------------ loading


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with two repairs: `1e-3` and `-.5` are numbers, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(f"{key!r}: a key is a name{key_node.start_mark}")
            if key in seen:
                raise ConfigError(f"{key}: given twice{key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of a file (the embedded default without one) with `key=value` overrides.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a wrong value, an impossible combination.
    """
    raw = deepcopy(DEFAULTS)
    given: dict[str, Any] = {}
    if path is not None:
        given = _read(Path(path))
        merge(raw, given)
    for override in overrides:
        key, value = _split(override)
        _set(raw, key, value)
        given[key.split(".")[0]] = value
    _expand_phases(raw, rounds_given="rounds" in given)
    return validate(raw)


def validate(raw: dict[str, Any]) -> Config:
    """Check a complete mapping (defaults merged in).

    Raises:
        ConfigError: naming every key that is wrong.
    """
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, raw) for item in error.errors())) from None
    _check_combinations(config)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a config: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys to values, got {type(content).__name__}")
    return content


def _split(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r}: an override is key=value, for example local.lr=0.1")
    try:
        return key, yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: {text!r} is not a YAML value") from None


def merge(base: dict[str, Any], changes: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
    """Lay `changes` over `base` in place.

    A mapping that names another method (`type`, or `dataset` in `data`) drops the parameters of the old one,
    except those that the whole family shares.
    """
    for key, value in changes.items():
        where = (*path, str(key))
        old = base.get(key)
        if isinstance(old, dict) and (where in _METHOD_PATHS or where[-2:] in _METHOD_PATHS):
            value = _named(value)
        if isinstance(old, str) and isinstance(value, dict) and value.get("type", old) == old:
            old = base[key] = {"type": old}
        if isinstance(old, dict) and isinstance(value, Mapping):
            _drop_other_method(old, value, where)
            merge(old, value, where)
        else:
            base[key] = deepcopy(value)


# Where a bare name may stand for `{type: name}`.
_METHOD_PATHS = {
    ("model",),
    ("filter",),
    ("data", "partition"),
    ("local", "algorithm"),
    ("server", "aggregator"),
    ("server", "weights"),
    ("server", "optimizer"),
}


def _drop_other_method(old: dict[str, Any], new: Mapping[str, Any], where: tuple[str, ...]) -> None:
    if where == ("data",):
        if "dataset" in new and new["dataset"] != old.get("dataset"):
            for key in [key for key in old if key not in _DATA_COMMON]:
                del old[key]
    elif "type" in new and new["type"] != old.get("type"):
        kept = {"data": methods.PARTITION_COMMON, "filter": methods.FILTER_COMMON}.get(where[0], {})
        for key in [key for key in old if key not in kept]:
            del old[key]


def _set(raw: dict[str, Any], dotted: str, value: Any) -> None:
    """Apply one override; a number in the path is a place in a list (`phases.0.rounds`)."""
    parts = dotted.split(".")
    for depth, part in enumerate(parts):
        if part.isdigit() and depth:
            items = _descend(raw, parts[:depth])
            if not isinstance(items, list) or int(part) >= len(items):
                size = len(items) if isinstance(items, list) else "no"
                raise ConfigError(f"{dotted}: {'.'.join(parts[:depth])} has {size} entries")
            if depth == len(parts) - 1:
                items[int(part)] = value
            elif isinstance(items[int(part)], dict):
                merge(items[int(part)], _nest(parts[depth + 1 :], value))
            return
    merge(raw, _nest(parts, value))


def _nest(parts: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(parts):
        value = {part: value}
    return dict(value)


def _descend(raw: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


def _expand_phases(raw: dict[str, Any], rounds_given: bool) -> None:
    """Complete each phase with the sections that it does not override, and let `rounds` be their sum."""
    phases = raw.get("phases")
    if not isinstance(phases, list) or not phases:
        return
    complete = []
    for number, phase in enumerate(phases):
        if not isinstance(phase, dict):
            raise ConfigError(f"phases.{number}: a phase is a mapping with rounds and overrides, got {phase!r}")
        full = {key: deepcopy(raw[key]) for key in PHASE_SECTIONS if key in raw}
        merge(full, phase)
        complete.append(full)
    raw["phases"] = complete
    counts = [phase["rounds"] for phase in complete if isinstance(phase.get("rounds"), int)]
    if len(counts) == len(complete):
        total = sum(counts)
        if rounds_given and raw["rounds"] != total:
            raise ConfigError(
                f"rounds: got {raw['rounds']}, but the phases have {' + '.join(map(str, counts))} = {total} rounds; "
                "leave rounds out, or change phases.N.rounds"
            )
        raw["rounds"] = total


# ------------------------------------------------------------------------------------------ messages


def _explain(item: Any, raw: dict[str, Any]) -> str:
    """One pydantic error as a sentence: the dotted key, what was given, what is allowed."""
    key, kind, context = _dotted(item["loc"], raw), item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{key}: unknown key{_suggest(key.split('.')[-1], _allowed(item['loc']))}"
    if kind == "missing":
        return f"{key}: must be given"
    if kind in ("union_tag_invalid", "literal_error"):
        allowed = context.get("expected_tags") or context.get("expected", "")
        given = item["input"].get("type") if isinstance(item["input"], dict) else item["input"]
        return f"{key}: got {given!r}; allowed: {allowed.replace(' or ', ', ')}"
    if kind == "union_tag_not_found":
        return f"{key}: got {item['input']!r}; give a name, or a mapping with a type"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key}: got {item['input']!r}; {message}"


def _dotted(location: Sequence[int | str], raw: Any) -> str:
    """The key as the user writes it: pydantic's location also holds the tags of the unions."""
    parts: list[str] = []
    for part in location:
        in_list = isinstance(raw, list) and isinstance(part, int) and part < len(raw)
        if in_list or (isinstance(raw, dict) and part in raw):
            raw = raw[part]
        elif part in _TAGS and part != location[-1]:
            if parts[-1:] == ["dataset"]:
                parts.pop()
            continue
        parts.append(str(part))
    return ".".join(parts)


_TABLES = {
    "dataset": methods.DATASETS,
    "partition": methods.PARTITIONS,
    "model": methods.MODELS,
    "algorithm": methods.LOCAL_ALGORITHMS,
    "filter": methods.FILTERS,
    "aggregator": methods.AGGREGATORS,
    "weights": methods.WEIGHTS,
    "optimizer": methods.SERVER_OPTIMIZERS,
}
_COMMON = {"partition": methods.PARTITION_COMMON, "filter": methods.FILTER_COMMON}
_TAGS = {name for table in _TABLES.values() for name in table} | {"flip", "crop"}
_SECTIONS: dict[str, type[Section]] = {
    "data": DataFields,
    "local": Local,
    "server": Server,
    "eval": Eval,
    "checkpoint": Checkpoint,
    "tracking": Tracking,
    "runtime": Runtime,
}


def _allowed(location: Sequence[int | str]) -> list[str]:
    """The keys that are known where an unknown one was found."""
    parents = [part for part in location[:-1] if isinstance(part, str)]
    if len(parents) >= 2 and parents[-2] in _TABLES and parents[-1] in _TABLES[parents[-2]]:
        family, name = parents[-2:]
        known = ["type", *_COMMON.get(family, {}), *_TABLES[family][name].parameters]
        return [*_DATA_COMMON, *known[1:]] if family == "dataset" else known
    if parents and parents[-1] in _SECTIONS:
        return list(_SECTIONS[parents[-1]].model_fields)
    if parents == ["phases"]:
        return list(Phase.model_fields)
    return list(Config.model_fields) if not parents else []


def _suggest(key: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint or ';'} allowed: {', '.join(allowed)}" if allowed else hint


def _check_combinations(config: Config) -> None:
    population = config.data.partition.clients
    if config.cohort_size() > population:
        raise ConfigError(
            f"clients_per_round: got {config.cohort_size()}, but data.partition.clients is {population}; "
            f"allowed: at most {population}"
        )
    if config.runtime.backend == "nccl" and config.runtime.device == "cpu":
        raise ConfigError("runtime.backend: got 'nccl' with runtime.device 'cpu'; allowed on CPUs: gloo, auto")
    prefix = "phases.{}.server" if config.phases else "server"
    for number, phase in enumerate(config.schedule()):
        aggregator = phase.server.aggregator
        if aggregator.type == "fipa" and aggregator.convention == "released" and aggregator.damping == 0:
            raise ConfigError(
                f"{prefix.format(number)}.aggregator.damping: got 0 with convention 'released', whose update is "
                "proportional to it: the model would never move; give damping > 0, or convention: exact"
            )
