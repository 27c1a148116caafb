"""Which rank trains which client: a pure function of the costs, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence


def assign(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Positions in `costs` for each rank, by longest processing time first (R. L. Graham, 1969).

    The most expensive item left goes to the rank with the least work; ties go to the lower position and the lower
    rank. Ranks may stay empty. The largest load is at most 4/3 - 1/(3 num_ranks) times the optimum.
    """
    loads = [0.0] * num_ranks
    plan: list[list[int]] = [[] for _ in range(num_ranks)]
    for position in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], len(plan[r]), r))
        plan[rank].append(position)
        loads[rank] += costs[position]
    return plan


def imbalance(costs: Sequence[float], plan: Sequence[Sequence[int]]) -> float:
    """Largest load over mean load; 1 is perfect. 1 as well when there is no work."""
    loads = [sum(costs[position] for position in positions) for positions in plan]
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
