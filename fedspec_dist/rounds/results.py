"""What a run came to, by the metric that counts: over all rounds and in each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

Records = Sequence[Mapping[str, Any]]  # of metrics.jsonl


def best_of(records: Records, metric: str, direction: str) -> Mapping[str, Any]:
    """The round with the best value, the first of equals; empty where there is none."""
    sign = 1 if direction == "max" else -1
    scored = [record for record in records if record.get(metric) is not None]
    return max(scored, key=lambda record: sign * record[metric], default={})


def by_phase(records: Records, metric: str, direction: str) -> list[dict[str, Any]]:
    """Of each phase its rounds, and the best, mean and last value in them."""
    found = []
    for number in sorted({int(record.get("phase", 0)) for record in records}):
        own = [record for record in records if record.get("phase", 0) == number]
        values = [record[metric] for record in own if record.get(metric) is not None]
        best = best_of(own, metric, direction)
        found.append(
            {
                "phase": number,
                "rounds": len(own),
                "metric": metric,
                "best": best.get(metric),
                "best_round": best.get("round"),
                "mean": mean(values) if values else None,
                "last": values[-1] if values else None,
            }
        )
    return found
