"""What docs/methods.md and the README's config table have from the code.

python -m docs.tables        # writes it anew; a test fails while it is not what the code says
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.local_methods import SETTINGS
from fedspec_dist.config import ConfigError, load, methods

PIPE = "\\|"
ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "methods.md", ROOT / "README.md"
STEP_TIMES = ROOT / "benchmarks" / "results" / "local_methods.json"

# The settings whose step takes more than a tenth longer than FedAvg's, and why.
COSTLY = {
    "scaffold, option 1": "a whole pass more in a client's round, here of one epoch; with E epochs a share of 1/E",
    "fedsam": "two passes",
    "fedsam, adaptive": "two passes",
    "mofedsam": "two passes",
    "moon": "three forward passes",
    "fedrcl": "similarities of the batch at every level",
}

# What a method needs of the rest of the config to run at all.
NEEDS = {
    ("server.aggregator", "inco"): ["model=resnet20"],
    ("local.algorithm", "fednova"): ["server.aggregator=fednova"],
}

# A method that does not stand alone.
AS = {("server.transforms", "noise"): "server.transforms=[clip, noise]"}


def pair_overrides(left: tuple[str, str], right: tuple[str, str]) -> list[str]:
    """The settings of a pair of methods, each given as `(key, name)`; what they need comes first."""
    needed = [*NEEDS.get(left, []), *NEEDS.get(right, [])]
    return [*needed, *(AS.get(method, "=".join(method)) for method in (left, right))]


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
        "local optimizers": family(methods.LOCAL_OPTIMIZERS),
        "tasks": tasks(),
        "models": family(methods.MODELS, methods.MODEL_COMMON),
        "filters": family(methods.FILTERS, methods.FILTER_COMMON),
        "aggregators": family(methods.AGGREGATORS),
        "statistics": statistics(),
        "transforms": family(methods.TRANSFORMS),
        "attacks": family(methods.ATTACKS, methods.ATTACK_COMMON),
        "weights": family(methods.WEIGHTS),
        "server optimizers": family(methods.SERVER_OPTIMIZERS),
        "partitions": family(methods.PARTITIONS, methods.PARTITION_COMMON),
        "pairs": pairs("local.algorithm", "server.aggregator"),
        "pairs with weights": pairs("server.weights", "server.aggregator"),
        "pairs with transforms": pairs("server.transforms", "server.aggregator"),
    }


def family(table: Mapping[str, methods.Method], common: Mapping[str, tuple[Any, Any]] | None = None) -> str:
    """Name, parameters with defaults, and the first sentence of its description."""
    rows = [[f"`{name}`", parameters(entry), summary(name, entry)] for name, entry in table.items()]
    text = markdown(["name", "parameters", ""], rows)
    if common:
        shared = ", ".join(f"`{key}` {_shown(default)}" for key, (_, default) in common.items())
        text += f"\nAll have {shared} besides.\n"
    return text


def tasks() -> str:
    """Name, parameters, description, and the metric that counts."""
    rows = []
    for name, entry in methods.TASKS.items():
        metric, direction = methods.headline_of(name)
        rows.append([f"`{name}`", parameters(entry), summary(name, entry), f"{metric}, {direction}"])
    return markdown(["name", "parameters", "", "what counts"], rows)


def statistics() -> str:
    """Name, and what a client finds out; their parameters are those of who asks."""
    return markdown(["name", ""], [[f"`{name}`", summary(name, entry)] for name, entry in methods.STATISTICS.items()])


def local_methods() -> str:
    """The same, with what travels and what it costs: from the classes and from the recorded measurement."""
    rows = []
    for name, entry in methods.LOCAL_ALGORITHMS.items():
        rows.append([f"`{name}`", parameters(entry), summary(name, entry), *_traffic_and_time(name)])
        variants = (label for label, setting in SETTINGS.items() if setting["type"] == name and label != name)
        rows += [[f"`{name}`{label.removeprefix(name)}", "", "", *_traffic_and_time(label)] for label in variants]
    table = markdown(["name", "parameters", "", "client keeps", "server keeps", "down", "up", "step"], rows)
    costly = "".join(f"* {label}, {_ratio(label)}: {why}.\n" for label, why in COSTLY.items())
    return f"{table}\nSteps that take more than a tenth longer than FedAvg's:\n\n{costly}"


def _traffic_and_time(label: str) -> list[str]:
    setting = dict(SETTINGS[label])
    made = methods.LOCAL_ALGORITHMS[setting.pop("type")].build(**setting)
    return [*(str(len(names)) for names in (made.own, made.server, made.broadcast, made.uploads)), _ratio(label)]


def step_times() -> dict[str, float]:
    """Setting of the benchmark -> recorded time of a step over FedAvg's, the median of its turns."""
    recorded = json.loads(STEP_TIMES.read_text())["ratio_to_fedavg"]
    return {label: ratios["median"] for label, ratios in recorded.items()}


def _ratio(label: str) -> str:
    times = step_times()
    return f"{times[label]:.2f}" if label in times else ""


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


def names() -> dict[str, str]:
    """Key of the config -> the methods it chooses from, as the README's config table has them."""
    return {
        key: ", ".join(f"`{name}`" for name in family.table)
        for key, family in methods.FAMILIES.items()
        if key != "server.filter"  # those of `filter`
    }


def filled(path: Path) -> str:
    """The page with every marked place as the code has it."""
    page = path.read_text()
    parts = {README: names, PAGE: lambda: {name: f"\n{table}" for name, table in tables().items()}}[path]()
    for name, part in parts.items():
        marked = re.compile(rf"(<!-- {re.escape(name)} -->).*?(<!-- end -->)", re.DOTALL)
        assert len(marked.findall(page)) == 1, f"{path.name} needs one place for: {name}"
        page = marked.sub(lambda match, part=part: f"{match[1]}{part}{match[2]}", page)  # type: ignore[misc]
    return page


def _shown(default: Any) -> str:
    """As YAML has it."""
    return "(required)" if default is ... else json.dumps(default).replace('"', "")


if __name__ == "__main__":
    for path in (PAGE, README):
        path.write_text(filled(path))
