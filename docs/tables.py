"""The tables of docs/methods.md that come from the code.

python -m docs.tables        # writes them anew; a test fails while they are not what the code says
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedspec_dist import methods
from fedspec_dist.config import ConfigError, load

PIPE = "\\|"
PAGE = Path(__file__).parent / "methods.md"
STEP_TIMES = Path(__file__).parents[1] / "benchmarks" / "results" / "local_methods.json"

# What a method needs of the rest of the config to run at all.
NEEDS = {
    ("server.aggregator", "inco"): ["model=resnet20"],
    ("local.algorithm", "fednova"): ["server.aggregator=fednova"],
}


def pair_overrides(left: tuple[str, str], right: tuple[str, str]) -> list[str]:
    """The settings of a pair of methods, each given as `(key, name)`; what they need comes first."""
    needed = [*NEEDS.get(left, []), *NEEDS.get(right, [])]
    return [*needed, *(f"{key}={name}" for key, name in (left, right))]


def refusal(left: tuple[str, str], right: tuple[str, str]) -> str | None:
    """Why config refuses the pair, None if it does not."""
    try:
        load(None, pair_overrides(left, right))
    except ConfigError as error:
        return str(error)
    return None


def tables() -> dict[str, str]:
    """Marker in the page -> table."""
    return {
        "local methods": local_methods(),
        "filters": family(methods.FILTERS, methods.FILTER_COMMON),
        "aggregators": family(methods.AGGREGATORS),
        "weights": family(methods.WEIGHTS),
        "server optimizers": family(methods.SERVER_OPTIMIZERS),
        "partitions": family(methods.PARTITIONS, methods.PARTITION_COMMON),
        "pairs": pairs("local.algorithm", "server.aggregator"),
        "pairs with weights": pairs("server.weights", "server.aggregator"),
    }


def family(table: Mapping[str, methods.Method], common: Mapping[str, tuple[Any, Any]] | None = None) -> str:
    """Name, parameters with defaults, and the first sentence of its description."""
    rows = [[f"`{name}`", parameters(entry), summary(name, entry)] for name, entry in table.items()]
    text = markdown(["name", "parameters", ""], rows)
    if common:
        shared = ", ".join(f"`{key}` {_shown(default)}" for key, (_, default) in common.items())
        text += f"\nAll have {shared} besides.\n"
    return text


def local_methods() -> str:
    """The same, with what travels and what it costs: from the classes and from the recorded measurement."""
    times = json.loads(STEP_TIMES.read_text())["ratio_to_fedavg"] if STEP_TIMES.exists() else {}
    rows = []
    for name, entry in methods.LOCAL_ALGORITHMS.items():
        made = entry.build()
        traffic = [len(made.own), len(made.server), len(made.broadcast), len(made.uploads)]
        ratio = f"{times[name]['median']:.2f}" if name in times else ""
        rows.append([f"`{name}`", parameters(entry), summary(name, entry), *map(str, traffic), ratio])
    return markdown(["name", "parameters", "", "client keeps", "server keeps", "down", "up", "step"], rows)


def pairs(rows: str, columns: str) -> str:
    """`+` where a pair runs, a number where it is refused; the reasons below."""
    reasons: list[str] = []
    cells = []
    for left in methods.FAMILIES[rows].table:
        row = [f"`{left}`"]
        for right in methods.FAMILIES[columns].table:
            why = refusal((rows, left), (columns, right))
            if why is not None and why not in reasons:
                reasons.append(why)
            row.append("+" if why is None else str(reasons.index(why) + 1))
        cells.append(row)
    text = markdown(["", *(f"`{name}`" for name in methods.FAMILIES[columns].table)], cells)
    return text + "".join(f"\n{number}. {why}" for number, why in enumerate(reasons, start=1)) + "\n" * bool(reasons)


def parameters(entry: methods.Method) -> str:
    return ", ".join(f"`{key}` {_shown(default)}" for key, (_, default) in entry.parameters.items()) or "-"


def summary(name: str, entry: methods.Method) -> str:
    """The first sentence on the method: of its module, where that begins with its name and a colon, or of its class."""
    module, _, attribute = entry.target.partition(":")
    loaded = importlib.import_module(module, "fedspec_dist")
    title, _, rest = _first_paragraph(loaded).partition(": ")
    its_own = title.replace("-", "").replace(" ", "").lower() == name.replace("_", "")
    sentence = re.split(r"\. |[.:]$", rest if its_own else _first_paragraph(getattr(loaded, attribute)))[0]
    return sentence[0].upper() + sentence[1:]


def _first_paragraph(documented: Any) -> str:
    return " ".join((documented.__doc__ or "").strip().split("\n\n")[0].split())


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', PIPE) for cell in line)} |\n" for line in lines)


def filled(page: str) -> str:
    """The page with every table as the code has it."""
    for name, table in tables().items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert len(marked.findall(page)) == 1, f"docs/methods.md needs one place for: {name}"
        page = marked.sub(lambda match, table=table: f"{match[1]}{table}{match[2]}", page)  # type: ignore[misc]
    return page


def _shown(default: Any) -> str:
    """As YAML has it."""
    return "(required)" if default is ... else json.dumps(default).replace('"', "")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
