"""Job scripts without submitit: `python -m launch.templates NAME [CONFIG] [key=value ...] > job.sbatch`.

Fills a template of `slurm/` from a config and its `cluster` section; the job runs in this folder. For an array, `--run`
says what each run differs in: `--run 'seed=0 local.lr=0.1' --run 'seed=1 local.lr=0.1'`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from fedspec_dist.config import Config, ConfigError, load, minutes, split_arguments
from launch.cluster import check, check_path, layout, sbatch_parameters

FOLDER = Path(__file__).parents[1] / "slurm"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.sbatch")))
EXIT_USAGE = 2
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def render(name: str, values: Mapping[str, Any]) -> str:
    """A template with its placeholders filled.

    A list is quoted word by word. In a line of #SBATCH, a missing value (None) drops the line and a list repeats it.
    The line of `{{run}}` is repeated for each of `runs`, a list of lists, with its `{{index}}`.

    Raises:
        ValueError: no such template, a placeholder without a value or the other way round, or a value that cannot stand
            in a job script.
    """
    if name not in NAMES:
        raise ValueError(f"template: got {name!r}; allowed: {', '.join(NAMES)}")
    text = (FOLDER / f"{name}.sbatch").read_text(encoding="utf-8")
    wanted = {"runs" if key == "run" else key for key in _PLACEHOLDER.findall(text)} - {"index"}
    if wanted != set(values):
        raise ValueError(
            f"{name}: values missing: {sorted(wanted - set(values))}, unknown: {sorted(set(values) - wanted)}"
        )
    return "".join(line for raw in text.splitlines(keepends=True) for line in _lines(raw, values))


def _lines(line: str, values: Mapping[str, Any]) -> list[str]:
    names = _PLACEHOLDER.findall(line)
    if "run" in names:
        return [_fill(line, {"index": index, "run": run}, _shell) for index, run in enumerate(values["runs"])]
    if not line.startswith("#SBATCH"):
        return [_fill(line, values, _shell)]
    if any(values[key] is None for key in names):
        return []
    repeated = [key for key in names if isinstance(values[key], (list, tuple))]
    if not repeated:
        return [_fill(line, values, _directive)]
    return [_fill(line, {repeated[0]: item}, _directive) for item in values[repeated[0]]]


def _fill(line: str, values: Mapping[str, Any], quoted: Any) -> str:
    return _PLACEHOLDER.sub(lambda found: quoted(_checked(found[1], values[found[1]])), line)


def _checked(key: str, value: Any) -> Any:
    texts = value if isinstance(value, (list, tuple)) else [value]
    for text in texts:
        if text is None or re.search(r"[\x00-\x1f\x7f]", str(text)):
            raise ValueError(f"{key}: got {text!r}; allowed: text without line breaks and control characters")
    return value


def _shell(value: Any) -> str:
    return shlex.join(map(str, value)) if isinstance(value, (list, tuple)) else shlex.quote(str(value))


def _directive(value: Any) -> str:
    """sbatch reads its lines by rules of its own: a backslash escapes within either quotes, and nowhere a space."""
    text = str(value)
    return (
        text if re.fullmatch(r"[\w%+,./:=@\[\]-]+", text, re.ASCII) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    )


def values_of(
    name: str, config: Config, arguments: Sequence[str], folder: Path, python: str, runs: Sequence[Sequence[str]] = ()
) -> dict[str, Any]:
    """What the template is filled with, from the config's `cluster` section.

    Raises:
        ConfigError: the section asks for what this template does not give.
    """
    cluster, shape = config.cluster, layout(config.cluster)
    check(config, "slurm")
    check_path("the folder of the job", folder)
    if shape.nodes > 1 and name in ("single_node", "array"):
        raise ConfigError(
            f"cluster.nodes: got {shape.nodes}, but a run of {name} has one node; allowed: 1, or the templates "
            "several_nodes and one_task_per_rank"
        )
    if cluster.requeue_on_failure:
        raise ConfigError(
            f"cluster.requeue_on_failure: got {cluster.requeue_on_failure}, but a template starts a job again only "
            "after a signal; allowed: 0, or launch.submit"
        )
    if bool(runs) != (name == "array"):
        raise ConfigError("--run: once for each run of an array, and for array only")
    further = sbatch_parameters(cluster, config.name, ())["additional_parameters"]
    per_rank = cluster.cpus_per_rank or 1
    values = {
        "name": config.name,
        "gpus_per_node": shape.gpus_per_node or None,
        "mem_mb": None if cluster.mem_gb is None else ceil(cluster.mem_gb * 1024),
        "minutes": minutes(cluster.time),
        "extra": [_option(key, value) for key, value in further.items() if key not in ("requeue", "mem")],
        "folder": folder,
        "python": python,
        "signal_before_s": cluster.signal_before_s,
        "max_requeues": cluster.max_requeues,
    } | {key: getattr(cluster, key) for key in ("partition", "account", "qos", "constraint", "exclude")}
    if name != "array":
        values["arguments"] = list(arguments)
    else:
        at_once = "" if cluster.array_parallelism is None else f"%{cluster.array_parallelism}"
        values |= {"array": f"0-{len(runs) - 1}{at_once}", "runs": [[*arguments, *run] for run in runs]}
    if name in ("several_nodes", "one_task_per_rank"):
        values["nodes"] = shape.nodes
    if name == "one_task_per_rank":
        return values | {"ranks_per_node": shape.ranks_per_node, "cpus_per_rank": per_rank}
    return values | {"ranks_per_node": shape.ranks_per_node, "cpus_per_node": shape.ranks_per_node * per_rank}


def _option(key: str, value: Any) -> str:
    return f"--{key}" if value is True else f"--{key}={value}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="launch.templates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("config", nargs="*", metavar="CONFIG | key=value")
    parser.add_argument("--run", action="append", default=[], metavar="'key=value ...'", help="of an array; repeated")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the job; this one, unless given")
    options = parser.parse_intermixed_args(arguments)
    try:
        runs = [shlex.split(run) for run in options.run]
        configs = [_load([*options.config, *run]) for run in runs or [[]]]
        values = values_of(options.name, configs[0], options.config, Path.cwd(), options.python, runs)
        print(render(options.name, values), end="")
    except ValueError as error:
        print(f"launch.templates: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _load(arguments: Sequence[str]) -> Config:
    return load(*split_arguments(arguments))


if __name__ == "__main__":
    sys.exit(main())
