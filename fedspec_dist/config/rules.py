"""Which settings do not go together, and why. Everything that is not refused here runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from fedspec_dist.config.files import ConfigError
from fedspec_dist.config.methods import FAMILIES, LOCAL_ALGORITHMS, TRAITS, Method, named_by
from fedspec_dist.config.schema import Config, Phase
from fedspec_dist.config.section import Choice


@dataclass(frozen=True)
class Rule:
    """`refuses(phase, config)` is true of a phase that cannot run; `key` is the setting to change, within the phase."""

    key: str
    refuses: Callable[[Phase, Config], bool]
    reason: str


_SMALLEST_LR = 1e-30
# How a chosen method is found in a phase or, of those that all phases share, in the config.
_OF_RUN = {"task", "model", "clients.attack"}


def _entry(key: str, phase: Phase, config: Config) -> Method:
    return FAMILIES[key].table[(config if key in _OF_RUN else phase).at(key).type]


def _is(key: str, trait: str, phase: Phase) -> bool:
    """Whether the method that a phase has at `key` has a trait."""
    assert trait in TRAITS
    return trait in FAMILIES[key].table[phase.at(key).type].traits


def _names(key: str, trait: str) -> str:
    return ", ".join(sorted(named_by(FAMILIES[key].table, trait)))


def _without_classes(key: str) -> Rule:
    names = [name for name, entry in FAMILIES[key].table.items() if "classes" not in entry.needs]

    def refuses(phase: Phase, config: Config) -> bool:
        task = _entry("task", phase, config)
        return task.is_ours and "classes" not in task.gives and "classes" in _entry(key, phase, config).needs

    return Rule(key, refuses, f"needs classes, which the task does not have; allowed with it: {', '.join(names)}")


def _without_blocks(phase: Phase, config: Config) -> bool:
    """Of a user's own model it is not known."""
    model = _entry("model", phase, config)
    needed = "blocks" in _entry("server.aggregator", phase, config).needs
    return needed and model.is_ours and "blocks" not in model.gives


def _counts_steps(phase: Phase) -> bool:
    return _is("local.algorithm", "counts_steps", phase) or _is("server.aggregator", "counts_steps", phase)


def _shrinks(phase: Phase) -> bool:
    return _is("server.aggregator", "shrinks", phase) or _is("server.weights", "shrinks", phase)


RULES = [
    *(_without_classes(key) for key in ("local.algorithm", "server.weights", "clients.attack")),
    Rule(
        "local.momentum",
        lambda phase, _: phase.local.momentum > 0 and _is("local.optimizer", "equal_steps", phase),
        f"is of local.optimizer: sgd; {_names('local.optimizer', 'equal_steps')} have beta1; allowed with them: 0",
    ),
    Rule(
        "local.optimizer",
        lambda phase, _: _is("local.optimizer", "equal_steps", phase) and _counts_steps(phase),
        "got one whose steps are as long whatever the gradient, with a method that divides a client's update by its "
        f"steps to get a gradient: {_names('local.algorithm', 'counts_steps')}; allowed with them: sgd",
    ),
    Rule(
        "server.shared",
        lambda phase, _: phase.server.shared != ["*"] and _is("local.algorithm", "server_half", phase),
        "got a part of the model with a local.algorithm whose server half takes whole updates: "
        f"{_names('local.algorithm', 'server_half')}; allowed with them: ['*']",
    ),
    Rule(
        "local.schedule",
        lambda phase, _: bool(phase.local.schedule) and _counts_steps(phase),
        "got epochs in which parts of the model train, with a method that counts a client's steps: "
        f"{_names('local.algorithm', 'counts_steps')}; allowed with them: []",
    ),
    Rule(
        "local.steps",
        lambda phase, _: bool(phase.local.schedule) and phase.local.steps is not None,
        "got a number of steps with local.schedule, which says how many epochs there are; allowed with it: null",
    ),
    Rule(
        "local.keep",
        lambda phase, _: bool(phase.local.keep) and phase.server.shared == ["*"],
        "got parameters that a client keeps, but server.shared says that all of them are aggregated; leave some out "
        "there",
    ),
    Rule(
        "local.algorithm",
        lambda phase, _: phase.local.algorithm.type == "fednova" and phase.server.aggregator.type != "fednova",
        "got 'fednova', whose other half is server.aggregator: fednova; without it this is FedAvg (or, with mu, "
        "FedProx): name that, or add the aggregator",
    ),
    Rule(
        "server.aggregator",
        lambda phase, _: phase.server.aggregator.type == "fednova" and _is("local.algorithm", "sums_drift", phase),
        "got 'fednova' with a local.algorithm whose server adds the clients' mean drift, which is of whole updates and "
        f"does not fit normalised ones; allowed with {_names('local.algorithm', 'sums_drift')}: any other aggregator",
    ),
    Rule(
        "local.momentum",
        lambda phase, _: (
            phase.server.aggregator.type == "fednova"
            and phase.local.momentum > 0
            and getattr(phase.local.algorithm, "mu", 0) > 0
            and _is("local.algorithm", "pulls", phase)
        ),
        "got a momentum together with mu > 0 and server.aggregator: fednova: the normaliser of a step is known for one "
        "of them only; allowed: momentum 0, or mu 0",
    ),
    Rule(
        "server.aggregator",
        _without_blocks,
        "got 'inco', which needs stages of residual blocks; allowed with it: model "
        + ", ".join(name for name, entry in FAMILIES["model"].table.items() if "blocks" in entry.gives),
    ),
    Rule(
        "server.weights",
        lambda phase, _: (
            _is("server.aggregator", "ignores_weights", phase) and _is("server.weights", "own_weights", phase)
        ),
        "got a weighting with an aggregator that ignores weights; allowed with "
        f"{_names('server.aggregator', 'ignores_weights')}: uniform, samples (which are ignored)",
    ),
    Rule(
        "server.aggregator.byzantine",
        lambda phase, config: _too_few_for_krum(phase, config.cohort_size()),
        "got a share for which Krum guarantees nothing: with f = floor(byzantine * K) of the K clients of a round it "
        "needs K >= 2 f + 3; allowed: a smaller share, or more clients_per_round",
    ),
    Rule(
        "server.transforms",
        lambda phase, _: "noise" in _chain(phase) and "clip" not in _chain(phase)[: _chain(phase).index("noise")],
        "got noise without a clip before it, of whose norm it is a multiple; allowed: [clip, noise]",
    ),
    Rule(
        "server.transforms",
        lambda phase, _: "noise" in _chain(phase)[:-1],
        "got something after noise, which adds one vector to all updates: it would see little but that vector; "
        "allowed: noise as the last one",
    ),
    Rule(
        "server.transforms",
        lambda phase, _: "clip" in _chain(phase) and _is("local.algorithm", "server_half", phase),
        "got clip with a local.algorithm whose server half takes the updates as they were received, however long: "
        f"{_names('local.algorithm', 'server_half')}; allowed with them: no clip and no noise",
    ),
    Rule(
        "server.weights",
        lambda phase, _: "clip" in _chain(phase) and _is("server.weights", "from_updates", phase),
        "got weights that are learned from the updates as they were received, with server.transforms that clip them so "
        "that none counts for more; allowed with clip: uniform, samples, feddisco",
    ),
    Rule(
        "server.aggregator",
        lambda phase, _: phase.server.aggregator.type == "fedgh" and "fedgh" in _chain(phase),
        "got 'fedgh' after server.transforms that have it already; allowed with them: fedavg, or any other",
    ),
    Rule(
        "server.optimizer",
        lambda phase, _: _shrinks(phase) and _is("server.optimizer", "remembers", phase),
        "got one that remembers or rescales directions with "
        f"{_names('server.aggregator', 'shrinks')} or {_names('server.weights', 'shrinks')}, which shrink the model: "
        "the shrinking would be repeated or rescaled like a gradient; allowed with them: sgd",
    ),
    Rule(
        "server.optimizer",
        lambda phase, _: _is("local.algorithm", "sums_drift", phase) and _is("server.optimizer", "remembers", phase),
        f"got one that remembers or rescales directions with {_names('local.algorithm', 'sums_drift')}, whose "
        "direction holds the sum of all earlier drifts: it would be summed twice, and diverges; allowed with them: sgd",
    ),
    Rule(
        "server.filter",
        lambda phase, _: phase.server.aggregator.type == "fedlws" and phase.server.filter.type != "none",
        "got a filter with server.aggregator: fedlws, whose direction holds the shrinking of the model, not the update "
        "alone; allowed with it: none",
    ),
    Rule(
        "server.weights",
        lambda phase, _: phase.server.aggregator.type == "fedlws" and phase.server.weights.type == "fedlaw",
        "got 'fedlaw' with server.aggregator: fedlws: the model would be shrunk twice; allowed with fedlws: any other",
    ),
    Rule(
        "server.aggregator.max_tau",
        lambda phase, _: (
            phase.server.aggregator.type == "fedlws"
            and phase.server.aggregator.max_tau < phase.server.aggregator.min_tau
        ),
        "got less than min_tau; allowed: at least min_tau",
    ),
    Rule(
        "local.algorithm",
        lambda phase, config: (
            "features" in _entry("local.algorithm", phase, config).needs
            and getattr(config.model, "hidden", None) == []
            and (config.model.projection is None or phase.local.algorithm.type == "fedrcl")
        ),
        "got a method that acts on learned features with a linear model, which has none; allowed: model.hidden with at "
        "least one layer",
    ),
    Rule(
        "local.algorithm.eta",
        lambda phase, _: (
            phase.local.algorithm.type == "fedsam"
            and not phase.local.algorithm.adaptive
            and phase.local.algorithm.eta != LOCAL_ALGORITHMS["fedsam"].parameters["eta"][1]
        ),
        "got a value that only the adaptive ascent uses; set local.algorithm.adaptive: true, or leave eta out",
    ),
    Rule(
        "local.algorithm.filter_ascent",
        lambda phase, _: getattr(phase.local.algorithm, "filter_ascent", False) and phase.filter.type == "none",
        "got true without a filter; choose one with filter.type, or leave filter_ascent out",
    ),
    Rule(
        "local.algorithm.mu",
        lambda phase, _: (
            phase.server.aggregator.type == "fednova"
            and _is("local.algorithm", "pulls", phase)
            and phase.local.lr * phase.local.algorithm.mu >= 2
        ),
        "got a pull with local.lr * mu >= 2, which steps past the global model and further: FedNova's normaliser "
        "may be zero; allowed: mu below 2 / local.lr",
    ),
    Rule(
        "local.lr_decay",
        lambda phase, config: phase.local.lr * phase.local.lr_decay ** (config.rounds - 1) < _SMALLEST_LR,
        f"got a decay that takes local.lr below {_SMALLEST_LR:g} in the last round, where float32 ends; allowed: one "
        "nearer to 1",
    ),
    Rule(
        "server.aggregator.damping",
        lambda phase, _: (
            phase.server.aggregator.type == "fipa"
            and phase.server.aggregator.convention == "released"
            and phase.server.aggregator.damping == 0
        ),
        "got 0 with convention 'released', whose update is proportional to it: the model would never move; give "
        "damping > 0, or convention: exact",
    ),
]


def _chain(phase: Phase) -> list[str]:
    return [transform.type for transform in phase.server.transforms]


def _too_few_for_krum(phase: Phase, cohort_size: int) -> bool:
    f = int(Fraction(str(getattr(phase.server.aggregator, "byzantine", 0))) * cohort_size)
    return f > 0 and cohort_size < 2 * f + 3


def _account(key: str, holds: Callable[[Phase, Config], bool], allowed: str) -> Rule:
    """What an account of the privacy spent takes for granted, see `server.transforms.privacy`."""

    def refuses(phase: Phase, config: Config) -> bool:
        asked = any(getattr(transform, "delta", None) is not None for transform in phase.server.transforms)
        return asked and not holds(phase, config)

    return Rule(key, refuses, f"does not go with a delta of noise, an account of the privacy spent; allowed: {allowed}")


RULES += [
    _account("phases", lambda _, config: not config.phases, "one phase, since a new one counts anew"),
    _account(
        "server.transforms", lambda phase, _: " ".join(_chain(phase)) == "clip noise", "[clip, noise], nothing else"
    ),
    _account("server.transforms", lambda phase, _: phase.server.transforms[-1].multiplier > 0, "a multiplier above 0"),
    _account("server.aggregator", lambda phase, _: phase.server.aggregator.type == "fedavg", "fedavg"),
    _account("server.weights", lambda phase, _: phase.server.weights.type == "uniform", "uniform"),
    _account(
        "local.algorithm",
        lambda phase, _: _is("local.algorithm", "only_updates", phase),
        f"one of which nothing but updates reaches the server: {_names('local.algorithm', 'only_updates')}",
    ),
    _account(
        "runtime.on_nonfinite",
        lambda _, config: config.runtime.on_nonfinite == "raise",
        "raise, since whom it leaves out depends on the data",
    ),
]


def check_combinations(config: Config) -> None:
    """Of a config whose every key is sound by itself.

    Raises:
        ConfigError: the first setting that does not go with the others.
    """
    population = config.data.partition.clients
    if population is not None and config.cohort_size() > population:
        raise ConfigError(
            f"clients_per_round: got {config.clients_per_round}, but data.partition.clients is {population}; "
            f"allowed: at most {population}"
        )
    if config.runtime.backend == "nccl" and config.runtime.device == "cpu":
        raise ConfigError("runtime.backend: got 'nccl' with runtime.device 'cpu'; allowed on CPUs: gloo, auto")
    _check_size(config.data.dataset)
    if config.runtime.precision == "tf32" and config.runtime.device == "cpu":
        raise ConfigError("runtime.precision: got 'tf32' with runtime.device 'cpu'; allowed on CPUs: float32")
    if config.runtime.precision == "tf32" and config.runtime.deterministic:
        raise ConfigError(
            "runtime.precision: got 'tf32', which types of GPUs round to in ways of their own, with "
            "runtime.deterministic; allowed with it: float32"
        )
    for number, phase in enumerate(config.schedule()):
        for rule in RULES:
            if rule.refuses(phase, config):
                of_phase = config.phases and not rule.key.startswith(("phases", "runtime"))
                prefix = f"phases.{number}." if of_phase else ""
                raise ConfigError(f"{prefix}{rule.key}: {rule.reason}")


_MAX_VALUES = 10**9


def _check_size(dataset: Choice) -> None:
    if dataset.type != "synthetic":
        return
    num_values = prod(dataset.shape) * (dataset.num_train + dataset.num_test)
    if num_values > _MAX_VALUES:
        raise ConfigError(
            f"data.shape: got {dataset.shape}, of which data.num_train and data.num_test make {num_values:.3g} values; "
            f"allowed: at most {_MAX_VALUES:.0e}"
        )
