"""How measured values are reported."""

from __future__ import annotations

import numpy as np


def quartiles(values: np.ndarray) -> dict[str, float]:
    """The median with the quartiles on either side."""
    return {key: float(np.quantile(values, at)) for key, at in (("q1", 0.25), ("median", 0.5), ("q3", 0.75))}
