"""What must not change without being meant to: names of run folders, final bits, keys of metrics, options of commands.

    python -m tests.golden.record        # writes golden.json anew; every line that changes has to be explained

Random configs are drawn once and kept with their fingerprints, so that what draws them may change.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import platform
import random
import re
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fedspec_dist.config import ConfigError, load
from fedspec_dist.config.methods import ATTACKS, FAMILIES
from launch.axes import load_sweep
from tests.rounds.jobs import run_job, tiny

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("golden.json")
NUM_RANDOM = 340
COMMANDS = (
    "fedspec_dist.main",
    "launch.submit",
    "launch.follow",
    "launch.status",
    "launch.cancel",
    "launch.sweep",
    "launch.templates",
)

# A method with what it needs, or with what makes it differ from its neighbours within two rounds.
_WITH = {
    ("local.algorithm", "fednova"): ["local.algorithm={type: fednova, mu: 0.1}", "server.aggregator=fednova"],
    ("server.weights", "fedlaw"): ["server.weights={type: fedlaw, epochs: 2, proxy_fraction: 0.2}"],
    ("server.aggregator", "fipa"): ["server.aggregator={type: fipa, rank: 3}"],
    ("server.aggregator", "inco"): ["server.aggregator=inco", "model=resnet20", "rounds=1"],
    ("server.aggregator", "centered_clipping"): ["server.aggregator={type: centered_clipping, radius: 0.1}"],
    ("server.transforms", "clip"): ["server.transforms=[{type: clip, norm: 0.05}]"],
    ("server.transforms", "noise"): ["server.transforms=[clip, {type: noise, multiplier: 0.1}]"],
    **{
        ("clients.attack", name): [f"clients.attack={{type: {name}, fraction: 0.5}}"]
        for name in ATTACKS
        if name != "none"
    },
}
# Families whose every method gets a run of its own.
_RUN = (
    "local.algorithm",
    "filter",
    "server.aggregator",
    "server.weights",
    "server.filter",
    "server.optimizer",
    "server.transforms",
    "clients.attack",
)
_OTHER_RUNS = {
    "scaffold, option 1": ["local.algorithm={type: scaffold, option: 1}"],
    "fedsam, adaptive": ["local.algorithm={type: fedsam, adaptive: true}"],
    "moon, projection": ["local.algorithm=moon", "model.projection=4"],
    "fedgh, snapshot": ["server.aggregator={type: fedgh, mode: snapshot}"],
    "fipa, tsqr": ["server.aggregator={type: fipa, rank: 3, merge: tsqr, convention: exact}"],
    "momentum, clip, ranges": [
        "local={momentum: 0.9, clip_norm: 1.0, epochs: {min: 1, max: 3}, lr_decay: 0.9}",
        "sampling=bernoulli",
        "dropout=0.2",
    ],
    "transforms before fednova": [
        "server.transforms=[{type: clip, norm: 0.05}, fedgh]",
        "server.aggregator=fednova",
        "local.algorithm=fednova",
    ],
    "augment": ["data.augment=[flip, {type: crop, padding: 1}]"],
    "phases": ["phases=[{rounds: 1}, {rounds: 1, server: {aggregator: {type: fipa, rank: 3}}, trainable: ['fc.*']}]"],
}


def record() -> dict[str, Any]:
    """All of it; runs take a quarter of a minute."""
    return {
        "where": where(),
        "fingerprints": dict(named_fingerprints()),
        "random": [[overrides, load(None, overrides).fingerprint()] for overrides in random_configs()],
        "runs": {name: outcome(overrides) for name, overrides in settings().items()},
        "help": {command: options_of(command) for command in COMMANDS},
    }


def where() -> dict[str, str]:
    """What the last bits depend on besides the code."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = cpus[0].partition(":")[2].strip() if cpus else platform.machine()
    return {"torch": torch.__version__, "cpu": name, "kernels": torch.backends.cpu.get_cpu_capability()}


def named_fingerprints() -> Iterator[tuple[str, str]]:
    """Those of the default, of every config and of every run that a sweep or study starts with."""
    yield "default", load().fingerprint()
    for path in sorted(ROOT.glob("configs/*/*.yaml")):
        if path.parent.name != "sweeps":
            yield str(path.relative_to(ROOT)), load(path).fingerprint()
    for path in [*sorted(ROOT.glob("configs/sweeps/*.yaml")), *sorted(ROOT.glob("benchmarks/studies/*.yaml"))]:
        for run in load_sweep(path).first_runs():
            yield f"{path.relative_to(ROOT)}: {run}", run.config.fingerprint()


def settings() -> dict[str, list[str]]:
    """The tiny runs: overrides by name."""
    named = {
        f"{family}: {name}": _WITH.get((family, name), [f"{family}={name}"])
        for family in _RUN
        for name in FAMILIES[family].table
    }
    return named | _OTHER_RUNS


def outcome(overrides: list[str]) -> dict[str, Any]:
    """The final model of a tiny run, as bits and as the norm of each tensor, and the keys of its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        finished = run_job(tiny(overrides), Path(folder))
    digest = hashlib.sha256()
    for name, tensor in sorted(finished.model.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    norms = {name: round(tensor.double().norm().item(), 4) for name, tensor in sorted(finished.model.items())}
    keys = sorted({key for line in finished.records for key in line})
    return {"bits": digest.hexdigest()[:16], "norms": norms, "metrics": keys}


def options_of(command: str) -> list[str]:
    """Every option of a command as its help names it, with its values."""
    text = io.StringIO()
    with (
        mock.patch.dict("os.environ", COLUMNS="200"),
        contextlib.redirect_stdout(text),
        contextlib.suppress(SystemExit),
    ):
        import_module(command).main(["--help"])
    return sorted(set(re.findall(r"^  (--[\w-]+(?: [^ \n]+)?)", text.getvalue(), re.MULTILINE)))


def random_configs() -> list[list[str]]:
    """Those that are recorded already, and new ones up to `NUM_RANDOM`, which may have methods that came since."""
    recorded = [overrides for overrides, _ in json.loads(FILE.read_text())["random"]] if FILE.exists() else []
    return [*recorded, *_drawn(NUM_RANDOM - len(recorded), seed=len(recorded))]


def _drawn(count: int, seed: int) -> Iterator[list[str]]:
    """Legal configs of all families, with parameters of the schema's kinds."""
    rng, found = random.Random(seed), 0
    while found < count:
        overrides = _random_overrides(rng)
        try:
            load(None, overrides)
        except ConfigError:
            continue
        found += 1
        yield overrides


def _random_overrides(rng: random.Random) -> list[str]:
    overrides = []
    for key, family in FAMILIES.items():
        if rng.random() < 0.5 or key == "data.dataset":
            continue
        name = rng.choice(list(family.table))
        numbers = {p: d for p, (_, d) in family.parameters(name).items() if type(d) is float}
        given = {p: round(d * rng.choice([0.5, 1.0, 1.5]), 6) for p, d in numbers.items() if rng.random() < 0.3}
        if key == "data.partition":
            given["clients"] = rng.choice([10, 20, 40])
        overrides.append(f"{key}={json.dumps({'type': name, **given})}")
    plain = {
        "seed": [0, 1, 7],
        "rounds": [1, 20, 100],
        "clients_per_round": [1, 5, 0.5],
        "sampling": ["fixed", "bernoulli"],
        "dropout": [0.0, 0.1],
        "local.lr": [0.01, 0.05, 1],
        "local.momentum": [0.0, 0.9],
        "local.epochs": [1, {"min": 1, "max": 3}],
        "local.clip_norm": [None, 1.0],
        "data.augment": [[], ["flip"]],
        "trainable": [["*"], ["fc.*"]],
        "data.dataset": ["digits", "cifar10", "synthetic", "fashion_mnist"],
        "runtime.deterministic": [False, True],
        "runtime.threads_per_rank": [1, 2],
    }
    for key, values in plain.items():
        if rng.random() < 0.4:
            overrides.append(f"{key}={json.dumps(rng.choice(values))}")
    return overrides


def main() -> None:
    torch.set_num_threads(1)  # as in tests, and in ranks: sums depend on it
    FILE.write_text(_lines(record()) + "\n")


def _lines(content: dict[str, Any]) -> str:
    """JSON with a line for each fact, so that a difference shows which one changed."""
    parts = []
    for key, value in content.items():
        entries = (
            [f"{json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()]
            if isinstance(value, dict)
            else [json.dumps(item) for item in value]
        )
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        parts.append(f"{json.dumps(key)}: {opening}\n" + ",\n".join(entries) + f"\n{closing}")
    return "{" + ",\n".join(parts) + "}"


if __name__ == "__main__":
    main()
