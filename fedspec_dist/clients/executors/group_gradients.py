"""The gradients of several clients' batches at once, each at parameters of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedspec_dist.clients.algorithms.base import Client, LocalAlgorithm
from fedspec_dist.core.batch import Batch, Inputs
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.tasks.base import Task

# Of the outputs for the same sample in different batches: kernels of other sizes add in another order.
_TOLERANCE = 1e-3


class GroupGradients:
    """Applies the model by `torch.func.vmap`, where rows of a matrix are the clients' parameters.

    Where the loss is the task's, the forward and the backward pass are recorded once for each shape of a batch, as a
    list of the operations that torch makes, and played back: for a small model, finding them out takes longer than
    they do. A model must therefore do the same for every batch of a shape, as one that torch can map over does.
    """

    def __init__(self, module: nn.Module, layout: ParameterLayout, task: Any, algorithm: LocalAlgorithm) -> None:
        self._module = module
        self._layout = layout
        self._task = task
        self._algorithm = algorithm
        self._sizes = [segment.size for segment in layout.segments]
        own_loss = type(algorithm).loss is not LocalAlgorithm.loss
        self.takes_clients = own_loss or type(task).terms is Task.terms  # one after the other, for their losses
        self._recorded: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {}
        self._outputs = vmap(self._output)

    def __call__(
        self, theta: Tensor, batch: Batch, padding: Tensor, clients: Sequence[Client]
    ) -> tuple[Tensor, Tensor]:
        """At `theta [C, P]`, of batches `[C, B, ...]`: gradients of the mean losses, and these, `[C]`.

        Samples that are `padding [C, B]`, always the last, do not count. Both are zero where all of a batch are.
        """
        if self.takes_clients or batch.targets is None:
            return self._of_own_losses(theta, batch, padding, clients)
        inputs = batch.all_inputs
        given = (theta, padding, batch.targets, *inputs)
        key = tuple((tensor.shape, tensor.dtype) for tensor in given)
        if key not in self._recorded:
            self._recorded[key] = _record(self._of_task, *given)
        with torch.no_grad():
            return self._recorded[key](*given)

    def why_not(self, theta: Tensor, batch: Batch) -> str:
        """Why the model cannot be applied to several clients at once, tried on two samples; empty when it can."""
        for part in self._module.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.padding_idx is not None:
                return "torch.func.vmap gets the gradients of an embedding with padding_idx wrong: multiply by a mask"
        places = torch.tensor([[0, 0, 1], [0, 1, 0], [0, 0, 0]], device=theta.device)
        inputs = batch.all_inputs
        tried = tuple(part[places] for part in inputs)
        rows = theta.expand(len(places), -1)
        try:
            with torch.no_grad():
                first, second = (self._outputs(rows, *tried) for _ in range(2))
            scales = torch.tensor([[1.0], [0.9], [1.1]]).to(theta)
            apart, together = self._tried_gradients(rows * scales, tried)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            if "random operation" in str(error):
                return "the model draws random numbers while it trains, as dropout does: set model.dropout=0"
            return f"the model cannot be applied to several clients at once: {str(error).splitlines()[0]}"
        if not torch.equal(first, second):
            return "the model's outputs differ from call to call: turn off what it draws"
        if not torch.allclose(first[:, 0], first[:1, 0].expand_as(first[:, 0]), _TOLERANCE, _TOLERANCE):
            return "the model's outputs for a sample depend on the others of its batch, which are padded: choose a norm"
        if (apart - together).abs().max() > _TOLERANCE * apart.abs().max():
            return "torch.func.vmap gets the model's gradients wrong"
        return ""

    def _tried_gradients(self, theta: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Of the squares of the outputs, at `theta [C, P]`: one client after the other, and all at once."""
        theta = theta.detach().requires_grad_()
        apart = [self._output(row, *(part[place] for part in inputs)) for place, row in enumerate(theta)]
        found = [torch.stack(apart), self._outputs(theta, *inputs)]
        one, other = (torch.autograd.grad(outputs.square().sum(), theta)[0] for outputs in found)
        return one, other

    def _output(self, theta: Tensor, *inputs: Tensor) -> Tensor:
        """Of one client's model, `theta [P]`."""
        parts = theta.split(self._sizes)
        shaped = {s.name: part.view(s.shape) for s, part in zip(self._layout.segments, parts, strict=True)}
        batch = Batch(inputs if len(inputs) > 1 else inputs[0])
        outputs: Tensor = self._task.outputs(lambda *given: functional_call(self._module, shaped, given), batch)
        return outputs

    def _of_task(self, theta: Tensor, padding: Tensor, targets: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """By the task's terms, of all clients in one call."""
        theta = theta.detach().requires_grad_()
        outputs = self._outputs(theta, *inputs)
        terms = self._task.terms(outputs.flatten(0, 1), targets.flatten(0, 1))
        sums, weights = (part.view(padding.shape).masked_fill(padding, 0.0).sum(1) for part in terms)
        losses = sums / weights.masked_fill(weights == 0, 1.0)
        return torch.autograd.grad(losses, theta, torch.ones_like(losses))[0], losses.detach()

    def _of_own_losses(
        self, theta: Tensor, batch: Batch, padding: Tensor, clients: Sequence[Client]
    ) -> tuple[Tensor, Tensor]:
        """By the local method's or the task's loss, one client after the other, of outputs made at once."""
        theta = theta.detach().requires_grad_()
        several = isinstance(batch.inputs, tuple)
        inputs = batch.all_inputs
        outputs = self._outputs(theta, *inputs)
        losses, counts = [], (~padding).sum(1).tolist()
        for place, (client, count) in enumerate(zip(clients, counts, strict=True)):
            own = outputs[place, :count]
            targets = None if batch.targets is None else batch.targets[place, :count]
            parts = tuple(part[place, :count] for part in inputs)
            given: Any = parts if several else parts[0]
            loss = own.sum() if not count else self._algorithm.loss(_Applied(own, given), given, targets, client)  # type: ignore[arg-type]
            losses.append(loss)
        stacked = torch.stack(losses)
        return torch.autograd.grad(stacked.sum(), theta)[0], stacked.detach()


class _Applied:
    """A client's model as its method's loss has it: what it gives for the batch is known, and nothing else."""

    def __init__(self, outputs: Tensor, inputs: Inputs) -> None:
        self._outputs = outputs
        self._inputs = inputs if isinstance(inputs, tuple) else (inputs,)

    def __call__(self, *inputs: Tensor) -> Tensor:
        if len(inputs) != len(self._inputs) or any(a is not b for a, b in zip(inputs, self._inputs, strict=True)):
            raise cannot("the local method applies the model to something other than its batch")
        return self._outputs

    def __getattr__(self, name: str) -> Any:
        raise cannot(f"the local method asks the model for {name!r}")


def cannot(why: str) -> ValueError:
    return ValueError(f"runtime.executor: got 'batched', but {why}; allowed: sequential")


def _record(function: Callable[..., Any], *given: Tensor) -> Any:
    """The operations that the function makes of tensors of these shapes, but those that change nothing."""
    # `--debug` turns the checks on; they look at values, which there are none of while operations are recorded.
    with torch.autograd.set_detect_anomaly(False):
        recorded: Any = make_fx(function)(*given)
    for node in list(recorded.graph.nodes):
        if node.op == "call_function" and _is_idle(node):
            node.replace_all_uses_with(node.args[0])
            recorded.graph.erase_node(node)
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    return recorded


def _is_idle(node: Any) -> bool:
    """It gives its first argument as it is: of a model of a few layers, a third of what torch records."""
    aten = torch.ops.aten
    if node.target is aten.mul.Scalar:
        return bool(node.args[1] == 1)
    if node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default):
        return bool(node.args[0].meta["val"].shape == node.meta["val"].shape)
    return node.target is aten.alias.default
