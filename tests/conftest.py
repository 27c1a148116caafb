"""One thread, as every rank has by default: the number of threads decides the last bits of sums."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
