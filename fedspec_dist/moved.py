"""Where modules of earlier versions are now, so that plugins written for those go on working. No torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# What a plugin may have imported; everything before the dot of a name is `fedspec_dist`.
MOVED = {
    **{name: f"core.{name}" for name in ("cohort", "parameters", "seeding", "draws", "checks", "failures")},
    **{name: f"config.{name}" for name in ("methods", "own_methods", "overrides")},
    "compatibility": "config.rules",
    "config_text": "config.files",
    **{
        f"data.{name}": f"data.images.{name}"
        for name in ("arrays", "augment", "cifar", "digits", "fashion_mnist", "npz", "npz_file", "synthetic")
    },
    **{
        f"distributed.{name}": f"processes.{name}"
        for name in ("devices", "environment", "gpus", "interfaces", "joining", "meeting", "memory", "orphans", "probe")
    },
    **{f"distributed.{name}": f"processes.{name}" for name in ("rendezvous", "runtime")},
    "distributed.watch": "processes.stop",
    "tracking": "runs.trackers",
    **{f"tracking.{name}": f"runs.trackers.{name}" for name in ("console", "metrics", "tensorboard")},
    "tracking.run_folder": "runs.folder",
    "tracking.text_files": "runs.safe_files",
    **{f"tracking.{name}": f"runs.{name}" for name in ("events", "safe_files", "streams")},
    **{f"models.{name}": "models.small" for name in ("mlp", "cnn", "lenet", "fipa_cnn")},
    "models.layers": "models.network",
    "models.modes": "models.network",
    "clients.sgd": "clients.optimizers",
    "clients.sequential": "clients.executors.sequential",
    "server.vectors": "server.distances",
    "server.coefficients": "server.distances",
    "filters.schedule": "filters.layerwise",
    "clients.algorithms.checks": "core.checks",
    "clients.sketching": "clients.statistics.derivatives",
    "fisher.diagonal": "fisher.products",
    "data.batches": "rounds.sampling",
    "clients.algorithms.directions": "clients.algorithms.losses",
    **{
        f"{folder}.{name}": f"{folder}.{new}"
        for folder, new, names in (
            ("clients.algorithms", "base", "fedavg"),
            ("clients.algorithms", "proximal", "fedprox fednova feddyn"),
            ("clients.algorithms", "controls", "scaffold feddc"),
            ("clients.algorithms", "sharpness", "fedsam fedcm mofedsam"),
            ("clients.algorithms", "losses", "fedlc moon feddecorr"),
            ("clients.statistics", "derivatives", "gradient fisher_diagonal sketches"),
            ("server.aggregators", "means", "fedavg fednova fisher_diagonal"),
            ("server.aggregators", "robust", "median trimmed_mean krum geometric_median centered_clipping"),
            ("server.transforms", "privacy", "clip noise"),
            ("data.partitions", "label_blind", "by_client_id"),
            ("runs", "safe_files", "text_files"),
        )
        for name in names.split()
    },
    "identity": "runs.identity",
    "sources": "runs.sources",
}


class _Finder(MetaPathFinder, Loader):
    """Gives the module itself under its old name: what it holds, such as the table of methods, is there once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "fedspec_dist" and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        old = spec.name.partition(".")[2]
        warnings.warn(f"fedspec_dist.{old} is now fedspec_dist.{MOVED[old]}", FutureWarning, stacklevel=2)
        module = import_module(f"fedspec_dist.{MOVED[old]}")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import machinery has put the old name's there


def install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before who would find a part of `tracking` in `runs.trackers` once more
