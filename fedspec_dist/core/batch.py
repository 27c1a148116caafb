"""Some samples, as models and tasks take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Inputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Batch:
    """`inputs` are a tensor `[B, ...]` or several, of any shapes and types; `targets [B, ...]`, or none."""

    inputs: Inputs
    targets: Tensor | None = None

    def __len__(self) -> int:
        return len(self.all_inputs[0])

    @property
    def all_inputs(self) -> tuple[Tensor, ...]:
        """The one input in a tuple, or the several."""
        return self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)

    def through(self, model: Callable[..., Any]) -> Any:
        """What a model gives for the inputs; several are its arguments, in order."""
        return model(*self.inputs) if isinstance(self.inputs, tuple) else model(self.inputs)

    def unflattened(self, size: int) -> Batch:
        """The same samples as `[size, B / size, ...]`: the batches of so many clients, one after the other."""

        def cut(part: Tensor) -> Tensor:
            return part.unflatten(0, (size, -1))

        inputs = tuple(map(cut, self.inputs)) if isinstance(self.inputs, tuple) else cut(self.inputs)
        return Batch(inputs, None if self.targets is None else cut(self.targets))

    def pair(self) -> tuple[Any, Any]:
        """Inputs and targets, for who takes tensors of any kind."""
        return self.inputs, self.targets
