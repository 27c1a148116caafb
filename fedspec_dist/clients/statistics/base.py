"""What a statistic of a client is, and how a round's are computed beside the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from fedspec_dist.clients.executors.base import ClientWork, Rows, Sent, largest_entry
from fedspec_dist.core.batch import Batch, Inputs
from fedspec_dist.core.draws import keyed
from fedspec_dist.core.failures import NonFiniteError
from fedspec_dist.core.parameters import ParameterLayout, with_parameters
from fedspec_dist.data.dataset import Examples
from fedspec_dist.fisher.products import Forward
from fedspec_dist.models.network import evaluating


@dataclass(frozen=True)
class Material:
    """What a statistic works with."""

    module: nn.Module
    layout: ParameterLayout  # of the parameters that are shared, [P]; the others are as the client has them
    task: Any
    examples: Examples  # the training samples, not augmented
    num_outputs: int
    batch_size: int  # samples at a time, where batches are wanted
    memory_budget_bytes: int = 2**30  # for Jacobians that are kept
    spare_bytes: int = 0  # of a GPU, for more of them

    def forward(self) -> Forward:
        """The model as `(theta [P], inputs) -> outputs`, differentiable in `theta`."""

        def forward(theta: Tensor, inputs: Inputs) -> Tensor:
            outputs: Tensor = self.task.outputs(with_parameters(self.module, self.layout, theta), Batch(inputs))
            return outputs

        return forward

    def batches(self, samples: Tensor) -> Iterator[tuple[Tensor, Batch]]:
        """Some of the training samples at positions `samples [n]` at a time, in their order: positions, and a batch."""
        return ((index, self.examples.batch(index)) for index in samples.split(self.batch_size) if len(index))


class Statistic:
    """Something that a client finds out about its own samples and sends beside its update.

    The result is a vector as long as the model (`width` None), which becomes a row of the matrix
    `cohort.uploads[name]`; or a short one of `width` numbers, of which all clients' are a tensor
    `cohort.uploads[name] [K, width]`, float64, on every rank. One of a `matrix` gives eigenvalues `[r]` and rows
    `[r, P]` for `cohort.sketches`, and has a parameter `rank`, the most rows of a client.

    The model is in eval mode. What is drawn from the global generators is keyed by seed, statistic, round and client.
    The parameters of a statistic are those that the method which needs it has under the same names.
    """

    when: ClassVar[Literal["before", "after"]] = "before"  # its training, at the model that it starts from or leaves
    is_matrix: ClassVar[bool] = False
    width: int | None = None  # one that depends on the model is known once the statistic is made

    def __init__(self, material: Material) -> None:
        self.material = material

    def compute(self, theta: Tensor, samples: Tensor, seed: int, round_index: int) -> Any:
        """From the parameters `theta [P]` and the client's training samples, at positions `samples [n]` int64.

        `seed` is the run's; with the round it keys what all clients draw alike.

        Raises:
            NonFiniteError: there is no result, which counts like an update that is not finite.
        """
        raise NotImplementedError(f"statistics: {type(self).__name__} defines compute(self, theta, samples, ...)")

    def working_bytes(self, num_samples: int) -> int:
        """The most memory that it takes beside the model, for `--plan`; a batch of training is counted anyway."""
        return 0


class Collector:
    """Computes statistics, by name, and writes them into a client's rows; see `executors.base.Statistics`."""

    def __init__(self, statistics: Mapping[str, Statistic], module: nn.Module, num_parameters: int) -> None:
        self._statistics = statistics
        self._module = module
        self._shared = slice(num_parameters)

    def before(self, work: ClientWork, sent: Sent, rows: Rows, place: int) -> list[Tensor]:
        return self._collect("before", sent.theta[self._shared], work, sent, rows, place)

    def after(self, work: ClientWork, sent: Sent, rows: Rows, place: int) -> list[Tensor]:
        if all(statistic.when == "before" for statistic in self._statistics.values()):
            return []
        theta = sent.theta[self._shared] + rows.updates[place, self._shared]
        return self._collect("after", theta, work, sent, rows, place)

    def _collect(self, when: str, theta: Tensor, work: ClientWork, sent: Sent, rows: Rows, place: int) -> list[Tensor]:
        largest = []
        for name, statistic in self._statistics.items():
            if statistic.when != when:
                continue
            draws = keyed(theta.device, sent.seed, f"statistic {name}", sent.round_index, work.client)
            with evaluating(self._module), draws:
                try:
                    found = statistic.compute(theta, work.samples, sent.seed, sent.round_index)
                except NonFiniteError:  # told to all ranks like an update that is not finite
                    largest.append(theta.new_tensor(float("inf")))
                    found = (theta.new_zeros(0), theta.new_zeros(0, len(theta))) if statistic.is_matrix else None
            if statistic.is_matrix:
                rows.sketches.append(found)
            elif found is not None:
                room = rows.uploads[name][place, self._shared] if statistic.width is None else rows.short[name][place]
                _require_shape(name, found, room)
                largest.append(largest_entry(room.copy_(found)))
        return largest


def _require_shape(name: str, found: Any, room: Tensor) -> None:
    """Ours hold this by themselves; a plugin's may not."""
    if not isinstance(found, Tensor) or found.shape != room.shape:
        kind = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(
            f"statistics: {name} gave {kind}; allowed is a tensor of shape {list(room.shape)}: "
            "the model's parameters that are shared, or what its `width` says"
        )
