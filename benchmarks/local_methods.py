"""What a step of each local method costs next to one of FedAvg.

    python -m benchmarks.local_methods --output benchmarks/results/local_methods.json     # a few minutes, idle machine

Clients of `--steps` steps are trained by every method in turn, round after round, in processor time of one thread: a
busy machine slows all alike. What a client keeps is handed in and out as in a run; its journey between ranks is not
in it. `docs/methods.md` shows the recorded ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.one_client import on_random_images, work_of
from benchmarks.spread import quartiles
from fedspec_dist.clients.optimizers import LocalSgd
from fedspec_dist.clients.step import LocalMethods
from fedspec_dist.config import methods
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.filters.identity import Identity
from fedspec_dist.processes.memory import keep_freed_memory
from fedspec_dist.rounds.sampling import batch_bounds

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"type": name} for name in methods.LOCAL_ALGORITHMS},
    "scaffold, option 1": {"type": "scaffold", "option": 1},
    "fedsam, adaptive": {"type": "fedsam", "adaptive": True},
}


def measure(model: str, batch_size: int, num_steps: int, repeats: int) -> dict[str, Any]:
    """Per method: milliseconds a step, and the ratio to FedAvg's step of the same turn; quartiles over the turns."""
    clients = {name: _client(model, setting, batch_size, num_steps) for name, setting in SETTINGS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    for turn in range(repeats + 1):
        names = list(clients)
        for name in names if turn % 2 else reversed(names):
            started = time.thread_time()
            clients[name]()
            seconds[name].append(time.thread_time() - started)
    taken = {name: np.array(values[1:]) for name, values in seconds.items()}
    return {
        "model": model,
        "batch_size": batch_size,
        "steps_of_a_client": num_steps,
        "repeats": repeats,
        "ms_per_step": {name: quartiles(values / num_steps * 1e3) for name, values in taken.items()},
        "ratio_to_fedavg": {name: quartiles(values / taken["fedavg"]) for name, values in taken.items()},
    }


def _client(model: str, setting: Mapping[str, Any], batch_size: int, num_steps: int) -> Callable[[], object]:
    torch.manual_seed(0)
    module = methods.MODELS[model].build((3, 32, 32), 10)
    num_samples = num_steps * batch_size
    layout = ParameterLayout(module)
    parameters = {key: value for key, value in setting.items() if key != "type"}
    algorithm = methods.LOCAL_ALGORITHMS[setting["type"]].build(**parameters)
    local = LocalMethods(Identity(layout.segments), algorithm, LocalSgd(weight_decay=0.001))
    client, labels = on_random_images(module, layout, local, num_samples)
    everything = torch.arange(num_samples)
    work = work_of(everything, everything, batch_bounds(num_samples, batch_size, 1), labels, 10)
    theta = client.vectors.parameters.clone()
    update = torch.empty_like(theta)
    # A client that has been here before: MOON has a previous model.
    own = torch.stack([theta * 0.99 for _ in algorithm.own]) if algorithm.own else None
    uploads = {name: torch.empty_like(theta) for name in algorithm.uploads}

    return lambda: client.train(work, theta, 1e-4, update, own, uploads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnn23k")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--steps", type=int, default=10, help="of a client (default: 10, one epoch of 500 samples)")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    result = measure(options.model, options.batch_size, options.steps, options.repeats)
    result |= {"torch": torch.__version__, "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    for name, ratio in sorted(result["ratio_to_fedavg"].items(), key=lambda item: item[1]["median"]):
        spread = f"({ratio['q1']:.3f} to {ratio['q3']:.3f})"
        print(f"{name:22} {result['ms_per_step'][name]['median']:7.2f} ms  {ratio['median']:6.3f}  {spread}")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
