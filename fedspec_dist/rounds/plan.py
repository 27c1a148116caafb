"""`--plan`: what a run would do, worked out without training anything."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fedspec_dist.config import Config, Phase
from fedspec_dist.data.batches import num_steps
from fedspec_dist.distributed.assignment import assign, imbalance
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.distributed.environment import Environment
from fedspec_dist.parameters import ParameterLayout
from fedspec_dist.rounds.experiment import Federation, build_model, load_federation
from fedspec_dist.rounds.phases import phase_of_round
from fedspec_dist.rounds.sampling import sample_cohort

_SHOWN_ROUNDS = 5
_FLOAT_BYTES = 4


def print_plan(config: Config, environment: Environment, num_ranks: int | None, console: Console) -> int:
    """Cohorts, assignment, steps, imbalance, bytes and memory of the first rounds; for `num_ranks` if given."""
    if environment.rank:
        return 0
    num_ranks = num_ranks or environment.num_ranks
    federation = load_federation(config, prepares=True)
    module = build_model(config, federation.dataset)
    schedule = config.schedule()
    console.print(_rounds_table(config, schedule, federation, num_ranks))
    console.print(_phases_table(config, schedule, federation, module, num_ranks))
    sizes = sorted(len(samples) for samples in federation.clients)
    print(
        f"clients: {len(sizes)}, of {sizes[0]} to {sizes[-1]} samples (median {sizes[len(sizes) // 2]}); "
        f"data set in memory: {_megabytes(_data_bytes(federation))}; run folder: {config.run_folder()}",
        file=console.file,
    )
    return 0


def _rounds_table(config: Config, schedule: Sequence[Phase], federation: Federation, num_ranks: int) -> Table:
    table = Table(title=f"first rounds on {num_ranks} rank(s)", title_justify="left")
    for column in ("round", "rank", "clients", "local steps", "expected imbalance"):
        table.add_column(column, justify="left" if column == "clients" else "right")
    for index in range(min(_SHOWN_ROUNDS, config.rounds)):
        local = schedule[phase_of_round(schedule, index)].local
        cohort = sample_cohort(config.seed, index, federation.population, config.cohort_size())
        samples = federation.num_samples(cohort)
        costs = [count * local.epochs for count in samples]
        plan = assign(costs, num_ranks)
        for rank, positions in enumerate(plan):
            steps = sum(num_steps(samples[p], local.batch_size, local.epochs) for p in positions)
            clients = ", ".join(str(cohort[p]) for p in positions) or "none"
            first = rank == 0
            balance = f"{imbalance(costs, plan):.2f}" if first else ""
            table.add_row(str(index + 1) if first else "", str(rank), clients, str(steps), balance)
        table.add_section()
    return table


def _phases_table(
    config: Config, schedule: Sequence[Phase], federation: Federation, module: object, num_ranks: int
) -> Table:
    table = Table(title="each phase, per rank", title_justify="left")
    columns = ("phase", "rounds", "parameters", "trainable", "bytes sent a round", "memory for vectors")
    for column in columns:
        table.add_column(column, justify="right")
    total = sum(parameter.numel() for parameter in module.parameters())  # type: ignore[attr-defined]
    for number, phase in enumerate(schedule):
        size = len(ParameterLayout(module, phase.trainable))  # type: ignore[arg-type]
        sent, held = _traffic_and_memory(config, phase, size, num_ranks)
        row = (number, phase.rounds, f"{total:,}", f"{size:,}", _megabytes(sent), _megabytes(held))
        table.add_row(*map(str, row))
    return table


def _traffic_and_memory(config: Config, phase: Phase, size: int, num_ranks: int) -> tuple[float, float]:
    """Bytes that the busiest rank sends in a round, and bytes of vectors that it holds at once.

    Sent: its clients' rows except its own columns, then its slice of the model to the others. Held: the executor's
    vectors, the rows and the column blocks. Activations are not counted; they depend on the framework's kernels.
    """
    cohort, rank = config.cohort_size(), getattr(phase.server.aggregator, "rank", 0)
    cut = Columns.gathered if config.runtime.aggregation == "gather" else Columns.shared
    columns = cut(size, num_ranks, rank * cohort)
    rows = -(-cohort // num_ranks) * (1 + rank)
    blocks = cohort * (1 + rank) * columns.count(0) * columns.width
    others = columns.padded - min(columns.count(r) for r in range(num_ranks)) * columns.width
    model = columns.count(0) * columns.width * (num_ranks - 1)
    vectors = 5 + (1 if phase.local.momentum else 0)
    return _FLOAT_BYTES * (rows * others + model), _FLOAT_BYTES * (vectors * size + rows * columns.padded + blocks)


def _data_bytes(federation: Federation) -> float:
    dataset = federation.dataset
    return _FLOAT_BYTES * (dataset.train_images.numel() + dataset.test_images.numel())


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"
