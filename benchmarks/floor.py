"""How much slower than a bare PyTorch loop a run is, and what the filter costs: `python -m benchmarks.floor`.

It starts its own processes, prints a table and, with `--output`, writes a JSON file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.filter_share import measure_filter
from benchmarks.plain_loop import PlainClient, PlainLoop
from benchmarks.spread import quartiles
from fedspec_dist.config import Config, load
from fedspec_dist.config.methods import MODELS
from fedspec_dist.data.images.augment import Augmentation
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.processes import runtime
from fedspec_dist.processes.environment import read_environment
from fedspec_dist.processes.memory import keep_freed_memory
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.rounds.federation import Federation
from fedspec_dist.rounds.loading import load_federation
from fedspec_dist.rounds.loop import Job, train
from fedspec_dist.rounds.making import build_model
from fedspec_dist.rounds.phases import Phases
from fedspec_dist.rounds.sampling import client_work, sample_cohort, workload
from fedspec_dist.rounds.stage import plan
from fedspec_dist.runs.folder import RunFolder

# Rounds at the start, not counted: memory pools, primitive caches, the first touch of the data.
WARM_UP = 2
# Largest difference of a parameter after a round that both began with the same model. Weights are of the order of 0.1.
TOLERANCE = 5e-5
LAPS = ("train", "wait", "exchange", "aggregate", "eval")


class FloorTimer:
    """A tracker. The loop calls it when a round of ours is over; then the plain loops do the same round, timed.

    So both run in turn in the same processes, and what is timed of ours is the loop that users run, from the end of
    one `log` to the start of the next.
    """

    def __init__(
        self,
        module: nn.Module,
        plain: Mapping[str, PlainLoop],
        work: Callable[[int], Sequence[PlainClient]],
        collectives: Collectives,
    ) -> None:
        self._module = module
        self._collectives = collectives
        self._plain = plain
        self._work = work
        self.wall: dict[str, list[float]] = {name: [] for name in ("ours", *plain)}
        self.cpu: dict[str, list[float]] = {name: [] for name in ("ours", *plain)}
        self.laps: list[dict[str, float]] = []
        self.differences: dict[str, list[float]] = {name: [] for name in plain}
        self.start()

    def start(self) -> None:
        self._collectives.all_gather(torch.zeros(1), "start of a timed round")
        self._started = time.perf_counter(), time.process_time()

    def stop(self, name: str) -> None:
        self.wall[name].append(time.perf_counter() - self._started[0])
        self.cpu[name].append(time.process_time() - self._started[1])

    def log(self, record: Mapping[str, Any]) -> None:
        self.stop("ours")
        self.laps.append({name: record[f"seconds_{name}"] for name in LAPS})
        round_index = record["round"] - 1
        clients = self._work(round_index)
        names = list(self._plain)
        for name in names if round_index % 2 else reversed(names):
            self.start()
            self._plain[name].round(clients)
            self.stop(name)
        ours = flat(self._module.parameters())
        for name, loop in self._plain.items():
            self.differences[name].append(float((ours - flat(loop.parameters)).abs().max()))
            # The next round begins alike: training would multiply this round's roundings by those of all to come.
            loop.start_from(self._module.parameters())
        self.start()

    def close(self) -> None:
        pass

    def gathered(self) -> dict[str, dict[str, np.ndarray]]:
        """Per round: the slowest rank's seconds (`wall`) and all ranks' processor seconds (`cpu`)."""
        names = list(self.wall)
        table = torch.tensor([[self.wall[name] for name in names], [self.cpu[name] for name in names]])
        everyone = self._collectives.all_gather(table, "gathering of times").double().numpy()
        wall, cpu = everyone[:, 0].max(axis=0), everyone[:, 1].sum(axis=0)
        return {"wall": dict(zip(names, wall, strict=True)), "cpu": dict(zip(names, cpu, strict=True))}


def floor_config(options: argparse.Namespace, output: str) -> Config:
    """FedAvg without a filter; evaluation and checkpoints come in the last round only, which is not counted."""
    never = options.rounds + WARM_UP + 1
    samples = options.clients * options.samples
    logistic = options.workload == "logistic"
    shape = [1, 28, 28] if logistic else [3, 32, 32]
    settings = {
        "name": "floor",
        "output": output,
        "data": f"{{dataset: synthetic, shape: {shape}, num_train: {samples}, num_test: 100}}",
        "data.partition": f"{{type: iid, clients: {options.clients}}}",
        "model": "{type: mlp, hidden: []}" if logistic else options.model,
        "rounds": never,
        "clients_per_round": options.cohort,
        "local.epochs": options.epochs,
        "local.batch_size": options.batch_size,
        "filter": "none",
        "eval.every": never,
        "checkpoint.every": never,
        "runtime.device": "cpu",
        "runtime.executor": options.executor,
    }
    return load(None, [f"{key}={value}" for key, value in settings.items()])


def floor_body(options: argparse.Namespace, config: Config, job_runtime: Runtime) -> int:
    """What every rank does; rank 0 writes the result to `options.worker`."""
    federation = load_federation(config, job_runtime.prepares_data)
    module = build_model(config, federation.dataset)
    images, labels = federation.dataset.train.inputs[0], federation.dataset.train.targets
    assert labels is not None
    plain = {
        name: PlainLoop(module, inputs, labels, config.local.lr, config.local.weight_decay)
        for name, inputs in (("plain contiguous", images.contiguous()), ("plain channels_last", images))
    }
    phases = Phases(config, module, federation, job_runtime)
    timer = FloorTimer(
        module, plain, lambda index: plain_work(config, federation, job_runtime, index), job_runtime.collectives
    )
    train(Job(config, job_runtime, federation, phases, RunFolder(config.run_folder()), timer), 0)
    times = timer.gathered()
    if job_runtime.is_main:
        result = summarize(times, timer.laps)
        result["differences"] = timer.differences
        result["num_parameters"] = sum(parameter.numel() for parameter in module.parameters())
        Path(options.worker).write_text(json.dumps(result))
    return 0


def plain_work(config: Config, federation: Federation, job_runtime: Runtime, round_index: int) -> list[PlainClient]:
    """The same clients on the same rank with the same batches in the same order."""
    cohort = sample_cohort(config, round_index, federation.population)
    num_samples = federation.num_samples(cohort)
    loads = [workload(config.seed, config.local, round_index, *pair) for pair in zip(cohort, num_samples, strict=True)]
    dealt = plan(config, [load.samples_seen for load in loads], job_runtime.num_ranks)
    clients = []
    for position in dealt[job_runtime.rank]:
        client = cohort[position]
        held = federation.clients[client], federation.class_counts[client]
        key = (config.seed, round_index, client)
        work = client_work(*key, *held, loads[position], Augmentation(), job_runtime.device)
        batches = [work.order[start:stop] for start, stop in work.bounds]
        clients.append(PlainClient(batches, num_samples[position] / sum(num_samples)))
    return clients


def summarize(times: Mapping[str, Mapping[str, np.ndarray]], laps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians over the counted rounds, and quartiles of the ratios of neighbouring rounds.

    `ratio` is against the faster of the plain loops.
    """
    counted = slice(WARM_UP, -1)
    wall, cpu = ({name: values[counted] for name, values in times[kind].items()} for kind in ("wall", "cpu"))
    plain = [name for name in wall if name != "ours"]
    fastest = min(plain, key=lambda name: float(np.median(wall[name])))
    return {
        "rounds": len(wall["ours"]),
        "fastest_plain": fastest,
        "ratio": quartiles(wall["ours"] / wall[fastest]),
        "cpu_ratio": quartiles(cpu["ours"] / cpu[fastest]),
        "ratios": {name: quartiles(wall["ours"] / wall[name]) for name in plain},
        "cpu_ratios": {name: quartiles(cpu["ours"] / cpu[name]) for name in plain},
        "seconds": {name: quartiles(values) for name, values in wall.items()},
        "cpu_seconds": {name: quartiles(values) for name, values in cpu.items()},
        "seconds_ours_by_lap": {name: float(np.median([lap[name] for lap in laps[counted]])) for name in LAPS},
    }


def measure_floor(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks as a user would, with torchrun, and wait for their result."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
        command += ["-m", "benchmarks.floor", *options.arguments, f"--worker={result}"]
        # One thread a rank: torchrun's own default, said here so that it does not warn.
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        measured: dict[str, Any] = json.loads(result.read_text())
    settings = ("model", "ranks", "clients", "samples", "cohort", "batch_size", "epochs")
    return {name: getattr(options, name) for name in settings} | measured


def require_same_model(floor: Mapping[str, Any]) -> None:
    """Raises ValueError: in some round the loops, which begin it with the same model, did not do the same work.

    They may differ by roundings: a convolution adds in another order in another memory format.
    """
    for name, differences in floor["differences"].items():
        for number, difference in enumerate(differences, start=1):
            if not difference <= TOLERANCE:
                raise ValueError(
                    f"ours and {name} differ by {difference:.3g} in a parameter after round {number}; "
                    f"allowed: {TOLERANCE:g}"
                )


def report(result: Mapping[str, Any], console: Console) -> None:
    if "floor" in result:
        _report_floor(result["floor"], console)
    if "filter" in result:
        for name, filtered in result["filter"].items():
            console.print(
                f"High-pass filter, ratio {filtered['ratio']}, on {name} ({filtered['num_parameters']:,} parameters), "
                f"batch {filtered['batch_size']}: {_percent(filtered['share_alone'])} of a step of "
                f"{filtered['step_ms_with']['median']:.1f} ms by itself; {_percent(filtered['share'])} as the "
                "difference of steps with and without"
            )


def _report_floor(floor: Mapping[str, Any], console: Console) -> None:
    table = Table(
        title=f"{floor['model']}, {floor['num_parameters']:,} parameters, {floor['ranks']} rank(s) of one thread, "
        f"{floor['rounds']} rounds"
    )
    for column in ("loop", "ms a round", "processor ms", "ours / it", "in processor time", "largest difference"):
        table.add_column(column, justify="left" if column == "loop" else "right")
    for name in floor["seconds"]:
        wall, cpu = (f"{floor[key][name]['median'] * 1e3:.1f}" for key in ("seconds", "cpu_seconds"))
        ratios = [_spread(floor[key][name]) if name != "ours" else "" for key in ("ratios", "cpu_ratios")]
        differences = floor["differences"].get(name, [])
        table.add_row(name, wall, cpu, *ratios, f"{max(differences):.0e}" if differences else "")
    console.print(table)
    laps = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in floor["seconds_ours_by_lap"].items())
    console.print(f"ours by part, ms: {laps}")
    console.print(f"[bold]{_spread(floor['ratio'])}[/bold] times the faster plain loop ({floor['fastest_plain']})")


def _spread(values: Mapping[str, float]) -> str:
    return f"{values['median']:.3f} ({values['q1']:.3f} to {values['q3']:.3f})"


def _percent(values: Mapping[str, float]) -> str:
    return f"{100 * values['median']:.1f} % ({100 * values['q1']:.1f} to {100 * values['q3']:.1f})"


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.floor", description=__doc__)
    parser.add_argument("--part", choices=("all", "floor", "filter"), default="all")
    parser.add_argument("--rounds", type=int, default=30, help="counted rounds (default: 30)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread (default: 2)")
    parser.add_argument("--model", default="lenet", help="any model of the config (default: lenet)")
    parser.add_argument("--executor", choices=("auto", "sequential", "batched"), default="auto")
    parser.add_argument(
        "--workload",
        choices=("images", "logistic"),
        default="images",
        help="logistic: a linear model of 1x28x28, 1000 clients of 60 samples, ten a round in batches of ten (W2)",
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=500, help="of a client (default: 500)")
    parser.add_argument("--cohort", type=int, default=20, help="clients a round (default: 20)")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=1, help="local epochs (default: 1)")
    parser.add_argument("--repeats", type=int, default=30, help="of the filter's measurement (default: 30)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, measures nothing")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # set for the ranks that this program starts
    return parser


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = _parser().parse_args(arguments)
    options.arguments = list(arguments)
    if options.workload == "logistic":
        sizes = {"clients": 1000, "samples": 60, "cohort": 10, "batch_size": 10}
        vars(options).update({name: size for name, size in sizes.items() if not _was_given(name, arguments)})
    if options.quick:
        tiny = {"rounds": 3, "clients": 6, "samples": 20, "cohort": 3, "batch_size": 8, "repeats": 2}
        vars(options).update(tiny)
    return options


def _was_given(name: str, arguments: Sequence[str]) -> bool:
    option = f"--{name.replace('_', '-')}"
    return any(word == option or word.startswith(f"{option}=") for word in arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(sys.argv[1:] if arguments is None else arguments)
    if options.worker:
        logging.basicConfig(level=logging.ERROR)
        with tempfile.TemporaryDirectory() as output:
            config = floor_config(options, output)
            return runtime.run(config.runtime, read_environment(), lambda job: floor_body(options, config, job))
    result: dict[str, Any] = {"torch": torch.__version__, "machine": platform.processor() or platform.machine()}
    if options.part != "filter":
        result["floor"] = measure_floor(options)
    if options.part != "floor":
        torch.set_num_threads(1)
        keep_freed_memory()  # as every rank of a run does
        result["filter"] = {
            name: measure_filter(MODELS[name].build((3, 32, 32), 10), options.batch_size, 0.05, options.repeats)
            for name in ("resnet20", "lenet")
        }
    report(result, Console(width=140))
    if "floor" in result:
        require_same_model(result["floor"])
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
