"""A sweep file: its form, and the runs that it stands for. Nothing here starts or reads a run.

    config: configs/digits.yaml               # looked for here, then beside the sweep file
    overrides: [rounds=20]                    # of all runs, as on the command line
    seeds: [1, 2, 3]
    axes:                                     # all combinations of the three
      grid: {data.partition.alpha: [0.1, 1]}  # all combinations
      zip: {local.epochs: [1, 5], rounds: [100, 20]}
      list: [{filter: none}, {filter: rfft, filter.ratio: 0.1}]
    methods:                                  # each with overrides, axes and tuning of its own
      fedavg:
      fedprox: {overrides: [local.algorithm=fedprox], tune: {over: {local.algorithm.mu: [0.01, 0.1]}}}
    tune: {over: {local.lr: [0.05, 0.1]}, seed: 0, last: 5, expand: true, budget: 60}

With `tune`, each method at each point of the axes first tries the grid `over` on the tuning seed, and compares on
validation samples (`data.holdout`, a tenth where the config has none); the seeds are then run at the best of it.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fedspec_dist.config import Config, ConfigError, load
from fedspec_dist.config.files import read, shown, split
from fedspec_dist.config.methods import TASKS, Count, CountOrZero, NotNegative, headline_of

log = logging.getLogger(__name__)

Keyed = dict[str, Any]  # dotted key of the config -> value

# Of a client's training samples, those that a tuning compares settings on, where the config keeps none.
HOLDOUT = 0.1
_MAX_PROBLEMS = 10
_MAX_RUNS = 20_000


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _override(text: str) -> str:
    split(text)
    return text


def _each_once(values: list[Any]) -> list[Any]:
    counts = Counter(json.dumps(value, sort_keys=True) for value in values)
    if twice := [text for text, count in counts.items() if count > 1]:
        raise ValueError(f"{twice[0]} is given twice")
    return values


def _scalars(values: list[Any]) -> list[Any]:
    if any(isinstance(value, (list, dict)) for value in values) or len(set(values)) < len(values):
        raise ValueError("must be different numbers or names")
    return values


def _same_length(lists: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
        raise ValueError(f"the lists of a zip must be of one length; {lengths}")
    return lists


Overrides = list[Annotated[str, AfterValidator(_override)]]
Values = Annotated[list[Any], Field(min_length=1), AfterValidator(_each_once)]
Scalars = Annotated[list[Any], Field(min_length=1), AfterValidator(_scalars)]


class Axes(Part):
    """`points` are all combinations of the grid, the zipped lists and the explicit points."""

    grid: dict[str, Values] = {}
    zipped: Annotated[dict[str, list[Any]], Field(alias="zip"), AfterValidator(_same_length)] = {}
    explicit: Annotated[list[Keyed], Field(alias="list")] = []

    def keys(self) -> list[str]:
        return [*self.grid, *self.zipped, *dict.fromkeys(key for point in self.explicit for key in point)]

    def num_points(self) -> int:
        lengths = [*map(len, self.grid.values()), *[len(values) for values in self.zipped.values()][:1]]
        return math.prod(lengths) * max(1, len(self.explicit))

    def points(self) -> list[Keyed]:
        grid = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        rows = [dict(zip(self.zipped, row, strict=True)) for row in zip(*self.zipped.values(), strict=True)] or [{}]
        return [a | b | c for a, b, c in itertools.product(grid, rows, self.explicit or [{}])]


def _metric(name: str) -> str:
    if not name.startswith(("val_", "test_", "train_", "client_")):
        raise ValueError("must be a metric of metrics.jsonl, such as val_accuracy, val_loss or train_loss")
    return name


class Over(Part):
    """What a method adds to the grid of the tuning."""

    over: dict[str, Scalars] = {}


class Tune(Over):
    """How a method's parameters are chosen; the same for all methods but for what they add to `over`."""

    # None: the one that counts, on validation samples; so is every `test_` metric that an older file names.
    metric: Annotated[str, AfterValidator(_metric)] | None = None
    last: Count = 1  # mean of so many last values
    seed: CountOrZero = 0
    expand: bool = False
    budget: Count | None = None  # points a method may try
    grid_points: Count | None = None  # each first grid must have as many
    tolerance: NotNegative = 0.0

    def metric_for(self, config: Config) -> str:
        """What the runs of a tuning are compared by; of what the config's results are tested on, never."""
        if self.metric is None:
            return f"val_{headline_of(config.task.type)[0]}"
        return f"val_{self.metric.removeprefix('test_')}" if self.metric.startswith("test_") else self.metric

    @property
    def validates(self) -> bool:
        return self.metric is None or self.metric.startswith(("val_", "test_"))


def _nothing_is_empty(value: Any) -> Any:
    return {} if value is None else value


class Method(Part):
    overrides: Overrides = []
    axes: Axes = Axes()
    tune: Over = Over()


class SweepFile(Part):
    config: str | None = None
    overrides: Overrides = []
    seeds: Annotated[list[CountOrZero], Field(min_length=1), AfterValidator(_each_once)] | None = None
    axes: Axes = Axes()
    methods: dict[Annotated[str, Field(min_length=1)], Annotated[Method, BeforeValidator(_nothing_is_empty)]] = {}
    tune: Annotated[Tune | None, BeforeValidator(_nothing_is_empty)] = None


@dataclass(frozen=True)
class Run:
    """One run of a sweep; `arguments` start it. The values are those of its config, not what was typed for them."""

    method: str
    point: Keyed  # its place on the axes
    tuned: Keyed  # and in the grid of the tuning
    config: Config
    arguments: list[str]
    tuning: bool = False

    @property
    def seed(self) -> int:
        return self.config.seed

    @functools.cached_property
    def folder(self) -> Path:
        return self.config.run_folder()

    def __str__(self) -> str:
        return " ".join([self.method, *_texts(self.point), *_texts(self.tuned), f"seed={self.seed}"])


@dataclass(frozen=True)
class Case:
    """A method at a point of the axes: what is tuned once and compared over seeds."""

    method: str
    point: Keyed
    over: dict[str, list[Any]]  # the first grid of its tuning
    path: str | None
    overrides: tuple[str, ...]

    def config(self) -> Config:
        """Of the case, before anything is tuned."""
        return _load(self.path, (*self.overrides, *_texts(self.point)))

    def run(self, tuned: Keyed, seed: int | None, tune: Tune | None = None) -> Run:
        """The run with these tuned values; one of the tuning keeps samples for validation, where the case does not.

        Raises:
            ConfigError: there is no such config; with the case that wants it.
        """
        last = [] if seed is None else [f"seed={seed}"]
        if tune is not None and tune.validates and not self.config().data.holdout:
            last.append(f"data.holdout={HOLDOUT}")
        overrides = (*self.overrides, *_texts(self.point), *_texts(tuned), *last)
        try:
            config = _load(self.path, overrides)
        except ConfigError as error:
            raise ConfigError(f"{' '.join([self.method, *_texts(self.point), *_texts(tuned)])}: {error}") from None
        arguments = [*([self.path] if self.path else []), *overrides]
        return Run(
            self.method,
            _resolved(config, self.point),
            _resolved(config, tuned),
            config,
            arguments,
            tune is not None,
        )

    def __str__(self) -> str:
        return " ".join([self.method, *_texts(self.point)])


def _resolved(config: Config, keyed: Keyed) -> Keyed:
    """What the config has at the keys, in the form in which they were typed."""
    return {key: _in_form_of(value, config.value(key)) for key, value in keyed.items()}


def _in_form_of(typed: Any, value: Any) -> Any:
    if isinstance(value, dict) and isinstance(typed, str):  # a method by its name
        return value.get("type")
    if isinstance(value, dict) and isinstance(typed, dict):
        return {key: _in_form_of(typed[key], value.get(key)) for key in typed}
    if isinstance(value, list) and isinstance(typed, list) and len(value) == len(typed):
        return [_in_form_of(*pair) for pair in zip(typed, value, strict=True)]
    return typed if typed == value else value


@dataclass(frozen=True)
class Sweep:
    """A checked sweep: its cases, seeds (None: the config's own) and tuning."""

    name: str
    cases: list[Case]
    seeds: list[int | None]
    tune: Tune | None

    def first_runs(self) -> list[Run]:
        """Those that are known before any result; the first grids where there is a tuning."""
        return [run for case in self.cases for run in self.first_runs_of(case)]

    def first_runs_of(self, case: Case) -> list[Run]:
        if self.tune is None:
            return [case.run({}, seed) for seed in self.seeds]
        keyed = [dict(zip(case.over, values, strict=True)) for values in itertools.product(*case.over.values())]
        return [case.run(tuned, self.tune.seed, self.tune) for tuned in keyed]


def load_sweep(path: Path, more: Sequence[str] = ()) -> Sweep:
    """The sweep of a file, `more` being overrides of all its runs; every run that is known by now is checked.

    Raises:
        ConfigError: what is wrong, of the sweep file and of the configs that it makes.
    """
    raw = read(path)
    try:
        file = SweepFile.model_validate(raw)
    except ValidationError as error:
        lines = [f"{path}: {_explain(item)}" for item in error.errors(include_url=False)[:_MAX_PROBLEMS]]
        raise ConfigError("\n".join(lines)) from None
    problems = [f"{path}: {text}" for text in itertools.islice(_contradictions(file, more), _MAX_PROBLEMS)]
    if problems:
        raise ConfigError("\n".join(problems))
    metric = (file.tune.metric if file.tune is not None else None) or ""
    if metric.startswith("test_"):
        twin = f"val_{metric.removeprefix('test_')}"
        log.warning(
            "%s: tune.metric: %s is what results are tested by; settings are compared by %s", path, metric, twin
        )
    sweep = Sweep(
        path.stem, _cases(file, _find(file.config, path), more), [*file.seeds] if file.seeds else [None], file.tune
    )
    _check_runs(sweep)
    for task in sorted({case.config().task.type for case in sweep.cases} if metric else ()):
        known = _metrics_of(task)
        if known and metric.replace("test_", "val_", 1) not in known:
            raise ConfigError(f"{path}: tune.metric: got {metric}; allowed with task {task}: {', '.join(known)}")
    if metric.startswith("client_") and any(c.config().data.partition.type == "natural" for c in sweep.cases):
        raise ConfigError(
            f"{path}: tune.metric: got {metric}, which with data.partition natural is of samples that results are "
            "tested on; allowed with it: val_accuracy and the like, or train_loss"
        )
    return sweep


def _metrics_of(task: str) -> list[str]:
    """What its settings can be compared by; nothing where that is not known before a run."""
    names = TASKS[task].metrics
    if not names:
        return []
    of_clients = [f"client_{name}_{of}" for name in names for of in ("mean", "std")]
    worst = f"client_{headline_of(task)[0]}_worst_decile"
    return [*(f"val_{name}" for name in names), "train_loss", *of_clients, worst]


def _find(config: str | None, sweep: Path) -> str | None:
    if config is None or Path(config).exists() or not (beside := sweep.parent / config).exists():
        return config
    return str(beside)


def _cases(file: SweepFile, path: str | None, more: Sequence[str]) -> list[Case]:
    cases = []
    methods = file.methods or {load(path, [*file.overrides, *more]).name: Method()}
    common = file.tune.over if file.tune else {}
    for name, method in methods.items():
        overrides = (*file.overrides, *method.overrides, *more)
        for outer, own in itertools.product(file.axes.points(), method.axes.points()):
            cases.append(Case(name, outer | own, common | method.tune.over, path, overrides))
    return cases


def _contradictions(file: SweepFile, more: Sequence[str]) -> Iterable[str]:
    """What no field can see by itself."""
    tune = file.tune
    num_runs = file.axes.num_points() * sum(m.axes.num_points() for m in (file.methods or {"": Method()}).values())
    num_runs *= len(file.seeds or [0])
    if num_runs > _MAX_RUNS:
        yield f"axes: stand for {num_runs} runs; allowed: at most {_MAX_RUNS}"
        return
    if tune is not None and tune.expand and tune.budget is None:
        yield "tune.budget: must be given with expand: how many points a method may try at most"
    for name, method in (file.methods or {"": Method()}).items():
        where = f"methods.{name}." if name else ""
        over = (tune.over if tune else {}) | method.tune.over
        keys = [*file.axes.keys(), *method.axes.keys(), *(tune.over if tune else []), *method.tune.over]
        if file.seeds is not None or tune is not None:
            keys.append("seed")
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            other = "seeds" if key == "seed" else "one place"
            yield f"{where}{key}: is set twice by axes, tune.over or seeds; leave it in {other}"
        for key in sorted({split(override)[0] for override in more} & set(keys)):
            yield f"{where}{key}: is set by the sweep itself; it cannot be overridden on the command line"
        if tune is None and method.tune.over:
            yield f"{where}tune: needs a tune section of the whole sweep, which says seed, metric and budget"
        if tune is not None:
            yield from (f"{where}{text}" for text in _tuning_problems(tune, over))


def _tuning_problems(tune: Tune, over: Mapping[str, list[Any]]) -> Iterable[str]:
    size = 1
    for key, values in over.items():
        size *= len(values)
        if size > _MAX_RUNS:
            yield f"tune.over: the first grid has {size} points or more; allowed: at most {_MAX_RUNS}"
            return
        if tune.expand and len(values) == 1 and type(values[0]) in (int, float):
            yield f"tune.over.{key}: got one value; give two or more, so that expand has a step, or use overrides"
        if tune.expand and len({type(value) in (int, float) for value in values}) > 1:
            yield f"tune.over.{key}: got numbers among other values, which expand cannot order; give numbers alone"
    if not over:
        yield "tune.over: must be given: the keys to tune, each with its values"
    if tune.budget is not None and size > tune.budget:
        yield f"tune.over: the first grid has {size} points, more than tune.budget, {tune.budget}"
    if tune.grid_points is not None and size != tune.grid_points:
        yield f"tune.over: the first grid has {size} points; tune.grid_points wants {tune.grid_points} of every method"


def _check_runs(sweep: Sweep) -> None:
    """Every first run has a config, and different points are different runs."""
    problems = []
    for case in sweep.cases:
        try:
            sweep.first_runs_of(case)
        except ConfigError as error:
            problems.append(str(error))
        if len(problems) == _MAX_PROBLEMS:
            break
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    seen: dict[tuple[str, Path], Run] = {}
    for run in sweep.first_runs():
        other = seen.setdefault((run.method, run.folder), run)
        if other is not run:
            raise ConfigError(
                f"{run} and {other} are the same run to a run's hash; leave out keys that have no part in the result, "
                "or give each its own name or output"
            )


@functools.cache
def _load(path: str | None, overrides: tuple[str, ...]) -> Config:
    return load(path, overrides)


# ------------------------------------------------------------------------------------------ texts


def as_override(key: str, value: Any) -> str:
    """`key=value` in the form that `overrides.split` reads back as the same value."""
    bare = f"{key}={value}"
    if isinstance(value, str) and _reads_as(bare, value):
        return bare
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _reads_as(override: str, value: str) -> bool:
    try:
        return split(override)[1] == value
    except ConfigError:
        return False


def _texts(point: Keyed) -> list[str]:
    return [as_override(key, value) for key, value in point.items()]


def _explain(item: Any) -> str:
    """One pydantic error as a sentence, in the style of the config's."""
    key = ".".join(str(part) for part in item["loc"] if part != "[key]")
    if item["type"] == "extra_forbidden":
        allowed = _fields(item["loc"][:-1])
        close = difflib.get_close_matches(str(item["loc"][-1]), allowed, n=1)
        return f"{key}: unknown key;{f' did you mean {close[0]}?' if close else ''} allowed: {', '.join(allowed)}"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key}: got {shown(item['input'])}; {message}"


def _fields(location: Sequence[int | str]) -> list[str]:
    """The keys known at a place of the file."""
    part: type[Part] = SweepFile
    for name in location:
        below: dict[str, type[Part]] = {"axes": Axes, "methods": Method, "tune": Over if part is Method else Tune}
        part = below.get(str(name), part)
    return [field.alias or name for name, field in part.model_fields.items()]
