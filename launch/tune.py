"""The search of a grid that grows until its best point has neighbours on all sides; a pure function.

The protocol of the SpecGradFilter paper: when the best point lies on the edge of the grid, or on a plateau that
reaches the edge, the grid grows outward there. All is worked out anew from the results so far, so a search that was
stopped goes on from whatever runs are there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Scalar = float | int | str | bool | None
Point = tuple[Scalar, ...]  # one value of each axis, in their order

# A step that a bound forbids is halved at most so often: 0.5, 0.9 of a fraction then go on with 0.968.
_HALVINGS = 3
_SPENT = "the budget of {budget} is spent"


@dataclass(frozen=True)
class Search:
    """A first grid (key -> values) and how it may grow; `budget` counts points.

    With `expand` an axis of numbers has two or more: their ratio is the first step.
    """

    axes: Mapping[str, Sequence[Scalar]]
    expand: bool = True
    budget: int | None = None
    tolerance: float = 0.0  # values that close to the best belong to its plateau


@dataclass(frozen=True)
class Verdict:
    """The best of all points; `interior` when on every ordered axis a value on either side was tried and is worse."""

    best: Point | None  # None: no point has a value
    value: float | None
    interior: bool
    reason: str
    tried: int


@dataclass
class _Grid:
    """The values of each axis as far as it has grown, and what has come out of its points."""

    values: dict[str, list[Scalar]]
    known: dict[Point, float | None] = field(default_factory=dict)

    def points(self) -> list[Point]:
        return list(itertools.product(*self.values.values()))

    def place(self, point: Point) -> list[int]:
        return [values.index(value) for values, value in zip(self.values.values(), point, strict=True)]

    def neighbour(self, point: Point, axis: int, side: int) -> Point | None:
        """The next point of the grid in that direction."""
        values = list(self.values.values())[axis]
        index = values.index(point[axis]) + side
        return _moved(point, axis, values[index]) if 0 <= index < len(values) else None

    def best(self) -> tuple[Point, float] | None:
        """The first of equals."""
        valued = [(point, value) for point, value in self.known.items() if value is not None]
        return max(valued, key=lambda item: item[1]) if valued else None

    def add(self, axis: str, side: int, value: Scalar) -> None:
        self.values[axis].insert(len(self.values[axis]) if side > 0 else 0, value)


def step(
    search: Search, told: Mapping[Point, float | None], legal: Callable[[Point], bool] = lambda point: True
) -> list[Point] | Verdict:
    """The points to try next, or what came out.

    `told` has the value of each point tried, larger being better, None for one that diverged. `legal` says whether a
    config takes a point.
    """
    grid = _Grid({key: _in_order(values) for key, values in search.axes.items()})
    first = {key: list(values) for key, values in grid.values.items()}
    while True:
        asked = _nearest_first(grid, [point for point in grid.points() if point not in grid.known and legal(point)])
        if search.budget is not None:
            asked = asked[: search.budget - len(grid.known)]
        if missing := [point for point in asked if point not in told]:
            return missing
        grid.known |= {point: told[point] for point in asked}
        found = grid.best()
        if found is None:
            return Verdict(None, None, False, "no point has a finite result", len(grid.known))
        sides = _open_sides(grid, found[1] - search.tolerance)
        reason = _grow(search, grid, first, sides, legal) if sides else _why_interior(grid)
        if reason is not None:
            return Verdict(*found, not sides, reason, len(grid.known))


def _grow(
    search: Search,
    grid: _Grid,
    first: Mapping[str, Sequence[Scalar]],
    sides: Mapping[tuple[int, int], Point],
    legal: Callable[[Point], bool],
) -> str | None:
    """Add a value on each open side; when none can be added, the reason."""
    keys = list(grid.values)
    names = {-1: "below", 1: "above"}
    where = ", ".join(f"{keys[axis]} {names[side]} {point[axis]}" for (axis, side), point in sides.items())
    if not search.expand:
        return f"not tried: {where}"
    if search.budget is not None and len(grid.known) >= search.budget:
        return f"{_SPENT.format(budget=search.budget)}; not tried: {where}"
    grown = False
    for (axis, side), point in sides.items():
        if grid.neighbour(point, axis, side) is None:
            for value in _beyond(grid.values[keys[axis]], first[keys[axis]], side):
                if legal(_moved(point, axis, value)):
                    grid.add(keys[axis], side, value)
                    grown = True
                    break
    return None if grown else f"at the bound of what the config allows: {where}"


def _why_interior(grid: _Grid) -> str:
    return "values on all sides are worse" if any(map(_ordered, grid.values.values())) else "all values were tried"


def _open_sides(grid: _Grid, threshold: float) -> dict[tuple[int, int], Point]:
    """Where the plateau of the best points has no tried neighbour: (axis, side) -> the first such point."""
    sides: dict[tuple[int, int], Point] = {}
    plateau = [point for point, value in grid.known.items() if value is not None and value >= threshold]
    for axis, values in enumerate(grid.values.values()):
        for side, point in itertools.product((-1, 1), plateau if _ordered(values) else ()):
            if grid.neighbour(point, axis, side) not in grid.known:
                sides.setdefault((axis, side), point)
    return sides


def _beyond(values: Sequence[Scalar], first: Sequence[Scalar], side: int) -> Iterator[Scalar]:
    """Values beyond the edge: by the step of the edge's neighbours, then by half of it, and so on.

    No step is below an eighth of the first grid's, so that growth towards a bound ends. A grid of whole numbers may be
    one of fractions too, as 1 and 10 of a learning rate: what lies beyond is tried as it is, and rounded only where the
    config takes whole numbers alone.
    """
    edge, inner = _edge(values, side)
    geometric = _is_geometric(values, edge, inner)
    smallest = abs(_step(first, *_edge(first, side))) / 2**_HALVINGS
    whole = all(isinstance(value, int) for value in values)
    for halving in range(_HALVINGS + 1):
        size = _step(values, edge, inner) / 2**halving
        if halving and abs(size) < smallest * (1 - 1e-6):
            return
        value = float(f"{edge * math.exp(size) if geometric else edge + size:.6g}")
        if not whole:
            yield value
        elif value == round(value) != edge:
            yield round(value)
        else:
            yield value
            yield edge + side if round(value) == edge else round(value)


def _edge(values: Sequence[Scalar], side: int) -> tuple[float, float]:
    edge, inner = (values[-1], values[-2]) if side > 0 else (values[0], values[1])
    return _number(edge), _number(inner)


def _number(value: Scalar) -> float:
    assert isinstance(value, (int, float))
    return value


def _in_order(values: Sequence[Scalar]) -> list[Scalar]:
    return sorted(values, key=_number) if _ordered(values) else list(values)


def _step(values: Sequence[Scalar], edge: float, inner: float) -> float:
    return math.log(edge / inner) if _is_geometric(values, edge, inner) else edge - inner


def _is_geometric(values: Sequence[Scalar], edge: float, inner: float) -> bool:
    return edge > 0 and inner > 0 and all(isinstance(value, (int, float)) and value >= 0 for value in values)


def _ordered(values: Sequence[Scalar]) -> bool:
    """Whether an axis has a direction to grow in: numbers, not names."""
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _nearest_first(grid: _Grid, points: list[Point]) -> list[Point]:
    """Those next to the best point so far first: what the last of a budget should be spent on."""
    found = grid.best()
    if found is None:
        return points
    centre = grid.place(found[0])
    return sorted(points, key=lambda p: sum(abs(a - b) for a, b in zip(grid.place(p), centre, strict=True)))


def _moved(point: Point, axis: int, value: Scalar) -> Point:
    return (*point[:axis], value, *point[axis + 1 :])
