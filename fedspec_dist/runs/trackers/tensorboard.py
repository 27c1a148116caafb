"""TensorBoard event files from the same records as `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """Every number of a record as a scalar; rounds after `resumed_round` of an earlier run are hidden.

    Raises:
        ValueError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path, resumed_round: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("tracking.tensorboard: needs the package tensorboard: pip install tensorboard") from None
        self._writer = SummaryWriter(str(folder), purge_step=resumed_round + 1)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "round" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, record["round"])

    def close(self) -> None:
        self._writer.close()
