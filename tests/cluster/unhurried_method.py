"""FedAvg with a pause before each client, as long as a file in the working folder says; no part of the result."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.vectors import LocalVectors


class Unhurried(LocalAlgorithm):
    def begin(self, vectors: LocalVectors, client: Client) -> None:
        with contextlib.suppress(OSError, ValueError):  # no file, or one that is being written
            time.sleep(float(Path("pause").read_text()))
