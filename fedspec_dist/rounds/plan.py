"""`--plan`: what a run would do, worked out without training anything."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from torch import nn

from fedspec_dist.config import Config, Phase
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.distributed.assignment import imbalance
from fedspec_dist.processes.environment import Environment
from fedspec_dist.rounds.federation import Federation, suit
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.making import build_model, make_algorithm, make_task
from fedspec_dist.rounds.memory import Activations, Work, data_bytes, has_gram, held
from fedspec_dist.rounds.phase_check import check_patterns
from fedspec_dist.rounds.phases import phase_of_round
from fedspec_dist.rounds.sampling import Workload, reporting, sample_cohort, workload
from fedspec_dist.rounds.stage import cost, cut_columns, plan
from fedspec_dist.rounds.statistics import Extras, material, max_rank
from fedspec_dist.runs.branch import rounds_before

_SHOWN_ROUNDS = 5
_SHOWN_CLIENTS = 20
_MANY = 1000  # vectors, of which a matrix of all pairs is worth a word
_FLOAT_BYTES, _SHORT_BYTES = 4, 8


def print_plan(config: Config, environment: Environment, num_ranks: int | None, console: Console) -> int:
    """Cohorts, assignment, steps, imbalance, bytes and memory of the first rounds; for `num_ranks` if given."""
    if environment.rank:
        return 0
    num_ranks = num_ranks or environment.num_ranks
    federation = load_federation(config, prepares=True)
    module = build_model(config, federation.dataset)
    federation = suit(config, federation, module)
    layouts = check_patterns(config, module, federation.dataset)
    console.print(_phases_table(config, module, layouts))
    activations = Activations.of(module, federation.dataset.train)
    pairs = zip(config.schedule(), layouts, strict=True)
    extras = [extras_of(config, phase, layout, module, federation) for phase, layout in pairs]
    console.print(_rounds_table(config, federation, layouts, extras, activations, num_ranks))
    sizes = sorted(len(samples) for samples in federation.clients)
    print(
        f"clients: {len(sizes)}, of {sizes[0]} to {sizes[-1]} samples (median {sizes[len(sizes) // 2]}); "
        f"data set: {_megabytes(data_bytes(federation))} a rank; run folder: {config.run_folder()}",
        file=console.file,
    )
    if note := _pairs_note(config):
        print(note, file=console.file)
    return 0


def _rounds_table(
    config: Config,
    federation: Federation,
    layouts: Sequence[ParameterLayout],
    extras: Sequence[Extras],  # of each phase
    activations: Activations,
    num_ranks: int,
) -> Table:
    table = Table(title=f"first rounds on {num_ranks} rank(s)", title_justify="left")
    columns = ("round", "rank", "clients", "local steps", "sends", "holds", "expected imbalance")
    for column in columns:
        table.add_column(column, justify="left" if column == "clients" else "right")
    schedule = config.schedule()
    first = rounds_before(config)
    for index in range(first, first + min(_SHOWN_ROUNDS, config.rounds)):
        number = phase_of_round(schedule, index - first)
        phase, layout = schedule[number], layouts[number]
        cohort, loads, costs, plan = plan_round(config, federation, index, phase, num_ranks)
        for rank, positions in enumerate(plan):
            steps = sum(loads[p].num_steps for p in positions)
            clients = _shown([cohort[p] for p in positions])
            largest = max((loads[p].num_samples for p in positions), default=0)
            states = len(federation.clients[rank::num_ranks])
            work = Work(len(cohort), len(positions), largest, states, len(federation.clients), extras[number])
            sent = traffic(config, phase, len(layout.shared), num_ranks, rank, work)
            most = held(config, phase, layout, activations, federation, num_ranks, rank, work)
            place, balance = (str(index + 1), f"{imbalance(costs, plan):.2f}") if rank == 0 else ("", "")
            table.add_row(place, str(rank), clients, str(steps), _megabytes(sent), _megabytes(most), balance)
        table.add_section()
    return table


def extras_of(
    config: Config, phase: Phase, layout: ParameterLayout, module: nn.Module, federation: Federation
) -> Extras:
    """What a client sends in this phase besides its update."""
    algorithm, dataset = make_algorithm(phase), federation.dataset
    algorithm.bind(layout.segments)
    given = material(config, phase, module, layout, dataset, make_task(config, dataset))
    return Extras.of(phase, algorithm, given)


def plan_round(
    config: Config, federation: Federation, index: int, phase: Phase, num_ranks: int
) -> tuple[list[int], list[Workload], list[float], list[list[int]]]:
    """Cohort, what each of it will do, what that costs, and the positions in the cohort that each rank trains."""
    cohort = reporting(config, index, sample_cohort(config, index, federation.population))
    samples = federation.num_samples(cohort)
    loads = [workload(config.seed, phase.local, index, *pair) for pair in zip(cohort, samples, strict=True)]
    algorithm = make_algorithm(phase)
    costs = [cost(algorithm, load) for load in loads]
    return cohort, loads, costs, plan(config, costs, num_ranks)


def _phases_table(config: Config, module: nn.Module, layouts: Sequence[ParameterLayout]) -> Table:
    table = Table(title="phases", title_justify="left")
    for column in ("phase", "rounds", "parameters", "trainable", "local", "filter", "aggregator"):
        table.add_column(column, justify="right")
    total = sum(parameter.numel() for parameter in module.parameters())
    for number, (phase, layout) in enumerate(zip(config.schedule(), layouts, strict=True)):
        chain = " > ".join([*(made.type for made in phase.server.transforms), phase.server.aggregator.type])
        names = (phase.local.algorithm.type, phase.filter.type, chain)
        table.add_row(str(number), str(phase.rounds), f"{total:,}", f"{len(layout):,}", *names)
    return table


def traffic(config: Config, phase: Phase, num_parameters: int, num_ranks: int, rank: int, work: Work) -> int:
    """Bytes that a rank sends to others in a round.

    Its clients' rows except its own columns, then its slice of the model, and of what goes with it, to the others; what
    clients keep, to its home and back, as if no client were at home; short vectors, to everybody. Small tables are left
    out, and matrices of clients as long as those are few.
    """
    algorithm = make_algorithm(phase)
    per_client = 1 + work.extras.rank + work.extras.rows
    columns = cut_columns(config, phase, num_parameters, num_ranks, work.population)
    own = columns.count(rank) * columns.width
    rows = work.num_clients * per_client
    # Slices are padded to the longest; a single owner of all columns broadcasts instead.
    longest = max(columns.count(other) for other in range(num_ranks)) * columns.width
    single = longest == columns.padded
    slices = 0 if single and not own else longest * (num_ranks - 1)
    kept_vectors = len(algorithm.own) * num_parameters if num_ranks > 1 else 0
    sent = rows * (columns.padded - own) + slices * (1 + len(algorithm.broadcast)) + work.num_clients * kept_vectors
    short = work.num_clients * work.extras.short * (num_ranks - 1)
    return sent * _FLOAT_BYTES + short * _SHORT_BYTES


def _pairs_note(config: Config) -> str:
    """What a large cohort costs where the server compares all pairs of clients; empty where it does not."""
    phases = [phase for phase in config.schedule() if has_gram(phase)]
    most = max((config.cohort_size() * max(1, max_rank(phase)) for phase in phases), default=0)
    if most < _MANY:
        return ""
    name = max(phases, key=max_rank).server.aggregator.type
    return (
        f"server.aggregator: {name} compares all pairs of {most} vectors in every round: time and memory grow with the "
        f"square, and the matrix of inner products alone takes {_megabytes(8 * most**2)} on every rank"
    )


def _shown(clients: Sequence[int]) -> str:
    """The first of them, and how many there are."""
    names = ", ".join(map(str, clients[:_SHOWN_CLIENTS])) or "none"
    return names if len(clients) <= _SHOWN_CLIENTS else f"{names}, ... ({len(clients)} in all)"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"
