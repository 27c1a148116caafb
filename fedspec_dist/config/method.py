"""What a line of the table of methods says: its class, kinds of parameters, words for what it is. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from fedspec_dist.config import own_methods

# Bounds that every machine's are below, so that a slip of the keyboard is told before memory is asked for.
MAX_COUNT = 2**31 - 1
MAX_AMOUNT = 10**5  # of a client's epochs or steps in a round, whose batches are drawn together
MAX_CLIENTS = 10**7
MAX_SAMPLES = 10**8
MAX_WIDTH = 10**6
MAX_PARAMETERS = 10**9  # 4 GB a vector, of which every rank has several
_FLOAT32 = (1.1754944e-38, 3.4028235e38)  # the smallest normal number and the largest


def _in_float32(value: float) -> float:
    """What tensors of float32 would take for 0 or for infinity is not what was typed."""
    if value and not _FLOAT32[0] <= abs(value) <= _FLOAT32[1]:
        raise ValueError(f"must be 0 or a number that float32 has, from {_FLOAT32[0]:.2g} to {_FLOAT32[1]:.2g}")
    return value


Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Classes = Annotated[int, Field(ge=2, le=MAX_WIDTH)]
Number = Annotated[float, AfterValidator(_in_float32)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_in_float32)]
NotNegative = Annotated[float, Field(ge=0), AfterValidator(_in_float32)]
Share = Annotated[float, Field(gt=0, le=1), AfterValidator(_in_float32)]
Fraction = Annotated[float, Field(ge=0, lt=1), AfterValidator(_in_float32)]
Patterns = Annotated[list[str], Field(min_length=1, max_length=1000)]

# Marks the type of an option that came after runs had been made. At its default, which is what those runs did, it has
# no part in the hash that names a run's folder, so that they are found again.
LATER = "later"


@dataclass(frozen=True)
class Method:
    """`target` is `module:Class`, the module's name starting with a dot when it is of this package; `parameters` maps
    a name to `(type with bounds, default)`."""

    target: str
    parameters: dict[str, tuple[Any, Any]]
    key: str = ""  # of the family, for a method of a user's own
    needs: frozenset[str] = frozenset()  # what it asks of the rest: words of `NEEDS`
    gives: frozenset[str] = frozenset()  # of a task or a model: which of these it has
    traits: frozenset[str] = frozenset()  # what it is, as far as others must know: words of `TRAITS`
    headline: tuple[str, str] | None = None  # of a task: the metric that counts, and whether `max` or `min` is better
    metrics: tuple[str, ...] = ()  # of a task: all of them, where known; a test has them of ours

    @property
    def is_ours(self) -> bool:
        return self.target.startswith(".")

    def load(self) -> Any:
        """The class (or, for partitions and models, the function) that the line names."""
        if self.key:
            return own_methods.load(self.key, self.target)
        module, _, name = self.target.partition(":")
        return getattr(import_module(module, "fedspec_dist"), name)

    def all_needs(self) -> frozenset[str]:
        """Those of the line; of a user's own also `needs`, `needs_features`, `needs_proxy` of its class, imported."""
        if self.is_ours:
            return self.needs
        made = self.load()
        said = [word for word in ("features", "proxy") if getattr(made, f"needs_{word}", False)]
        return self.needs | frozenset(getattr(made, "needs", ())) | frozenset(said)

    def build(self, *arguments: Any, **parameters: Any) -> Any:
        """Call it; of ours, with the defaults of the line for what is not given.

        Raises:
            ValueError: a user's own is not there, or not as its family's are.
        """
        made = self.load()
        if self.key:
            own_methods.check_call(self.key, self.target, made, arguments, parameters, self.parameters)
            return made(*arguments, **parameters)
        expected = signature(made)  # which has not all: the number of clients, say, is the program's to hand over
        missing = expected.parameters.keys() - expected.bind_partial(*arguments, **parameters).arguments.keys()
        defaults = {name: self.parameters[name][1] for name in missing & self.parameters.keys()}
        return made(*arguments, **parameters, **{name: value for name, value in defaults.items() if value is not ...})


# What a method may need, and what then is meant. A server's method may also need statistics of the clients.
NEEDS = {
    "curvature": "the task has `curvature` and `curvature_root`",
    "classes": "the targets are class numbers, one for each output of the model",
    "features": "the model tells its features apart from its last layer: a `models.network.Network`",
    "tokens": "the inputs are numbers of a vocabulary",
    "blocks": "the model has stages of residual blocks; who gives this may have them",
    "proxy": "samples of the server's own",
}

# What a method may be, as far as the rules of what does not go together must know.
TRAITS = {
    "only_updates": "nothing of a client reaches the server but its update",
    "server_half": "its server half works with whole updates, as they were received",
    "sums_drift": "its server adds the mean over all clients of what they have drifted so far",
    "counts_steps": "its formulas are of the length of a client's way: its steps times the learning rate",
    "pulls": "with `mu` above 0 it pulls towards the global model, which its count of steps accounts for",
    "equal_steps": "its steps are as long whatever the gradient",
    "ignores_weights": "an aggregator for which no client counts more than another",
    "own_weights": "its weights are more than the clients' shares",
    "from_updates": "its weights are learned from the updates as they were received",
    "shrinks": "it shrinks the model as a whole",
    "remembers": "it remembers or rescales directions",
}


def method(
    target: str,
    /,
    *,
    needs: Iterable[str] = (),
    gives: Iterable[str] = (),
    traits: Iterable[str] = (),
    headline: tuple[str, str] | None = None,
    metrics: Iterable[str] = (),
    **parameters: tuple[Any, Any],
) -> Method:
    return Method(
        target, parameters, "", frozenset(needs), frozenset(gives), frozenset(traits), headline, tuple(metrics)
    )


def named_by(table: Mapping[str, Method], trait: str) -> list[str]:
    """The methods of a table that have a trait."""
    return [name for name, entry in table.items() if trait in entry.traits]


@dataclass(frozen=True)
class Family:
    """The methods that one key of the config chooses from, and the parameters that all of them have besides."""

    table: dict[str, Method]
    common: dict[str, tuple[Any, Any]]

    def parameters(self, name: str) -> dict[str, tuple[Any, Any]]:
        return {**self.common, **self.table[name].parameters}
