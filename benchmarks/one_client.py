"""One client's round on images in memory, through the executor that runs use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedspec_dist.clients.executors.base import ClientWork, Kept, Rows, Sent
from fedspec_dist.clients.executors.sequential import SequentialExecutor
from fedspec_dist.clients.step import LocalMethods
from fedspec_dist.core.batch import Batch
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.data.images.augment import Augmentation
from fedspec_dist.tasks.classification import Classification

ROUND_INDEX = 6
FILTER_SEED = 1234
_as_they_are = Augmentation().gather


def work_of(
    samples: Tensor, order: Tensor, bounds: Sequence[tuple[int, int]], labels: Tensor, num_classes: int
) -> ClientWork:
    counts = labels[samples].bincount(minlength=num_classes)
    return ClientWork(0, samples, order, bounds, None, counts, FILTER_SEED)


class OneClient:
    """What the server sends and takes is reduced to vectors `[P]`."""

    def __init__(
        self,
        module: nn.Module,
        layout: ParameterLayout,
        methods: LocalMethods,
        images: Tensor,
        labels: Tensor,
        gather: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _as_they_are,
    ) -> None:
        def batch_of(index: Tensor, draws: Tensor | None) -> Batch:
            return Batch(gather(images, index, draws), labels.index_select(0, index))

        kept = Kept(len(methods.algorithm.own), len(layout))
        self.executor = SequentialExecutor(module, layout, Classification(), methods, batch_of, kept)
        self.vectors = self.executor.vectors
        self.sent: Mapping[str, Tensor] = {}
        self.kept: Tensor | None = None  # by the last call of `train`, [S, P]
        self._shape = (len(methods.algorithm.own), len(layout))

    def train(
        self,
        work: ClientWork,
        theta: Tensor,
        lr: float,
        update: Tensor,
        own: Tensor | None = None,  # [S, P]
        uploads: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The numbers of the client's report; `y - theta` goes into `update`, what it sends besides into `uploads`."""
        rows = Rows(update.unsqueeze(0), {name: vector.unsqueeze(0) for name, vector in (uploads or {}).items()})
        work = work if own is None else ClientWork(**{**vars(work), "state": own.reshape(-1)})
        [report] = self.executor.train(Sent(theta, lr, ROUND_INDEX, 0, self.sent), [work], rows, lambda: False)
        self.kept = None if report.kept is None else report.kept.view(self._shape)
        return report.numbers


def on_random_images(
    module: nn.Module, layout: ParameterLayout, methods: LocalMethods, num_samples: int
) -> tuple[OneClient, Tensor]:
    """A client of a problem with 10 classes of 3x32x32, and its labels `[n]`."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num_samples, 32, 32, 3, generator=generator).permute(0, 3, 1, 2)
    labels = torch.randint(10, (num_samples,), generator=generator)
    return OneClient(module, layout, methods, images, labels), labels
