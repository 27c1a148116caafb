"""Images of half the side."""

from __future__ import annotations

import numpy as np

from benchmarks.shrink import shrink


def test_a_pixel_is_the_rounded_mean_of_four() -> None:
    images = np.zeros((1, 4, 2, 3), np.uint8)
    images[0, :2, :, 0] = [[1, 2], [3, 4]]  # 2.5: halves go up
    images[0, 2:, :, 2] = 255
    small = shrink(images)
    assert small.dtype == np.uint8
    assert small.tolist() == [[[[3, 0, 0]], [[0, 0, 255]]]]
