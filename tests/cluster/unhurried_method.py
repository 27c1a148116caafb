"""FedAvg with a pause before each client, whose length the environment says and which has no part in the result."""

from __future__ import annotations

import os
import time

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.clients.vectors import LocalVectors


class Unhurried(LocalAlgorithm):
    def begin(self, vectors: LocalVectors, client: Client) -> None:
        time.sleep(float(os.environ.get("FEDSPEC_TEST_PAUSE_S", "0")))
