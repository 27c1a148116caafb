"""What a model must be like for a federated run, tried on two samples before the first round."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedspec_dist.config import Config
from fedspec_dist.config.methods import TASKS, headline_of
from fedspec_dist.core.batch import Batch
from fedspec_dist.core.parameters import matches
from fedspec_dist.models.network import evaluating
from fedspec_dist.tasks.base import Task


def check_model(config: Config, model: Any, batch: Batch, num_outputs: int, task: Task) -> None:
    """Raises ValueError unless the model's loss is a number that training can follow."""
    name = config.model.type
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {name} made a {type(model).__name__}; allowed is a torch.nn.Module")
    lazy = [key for key, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"model: {name} has parameters without a shape ({', '.join(lazy[:3])}), as torch's Lazy layers have until "
            "they see data; give their sizes from input_shape in the constructor"
        )
    if not any(True for _ in model.parameters()):
        raise ValueError(f"model: {name} has no parameters; there is nothing to train")
    _check_types(config, name, model)
    _check_frozen(config, name, model)
    tried = deepcopy(model).train()
    if config.runtime.dtype == "float64":
        tried.double()
    given, batch = batch, deepcopy(batch)
    explained = _Explained(f"model: {name} cannot be applied to", batch)
    with explained:
        outputs = task.outputs(tried, batch)
    task.check_outputs(name, outputs, batch, num_outputs)
    with explained:
        loss = task.loss(tried, batch)
    if tuple(loss.shape) != () or not loss.is_floating_point():
        raise ValueError(
            f"task: {config.task.type} gives a loss of shape {list(loss.shape)} and type {loss.dtype} for {name}; "
            "allowed is one floating-point number, the mean over the batch"
        )
    if not loss.requires_grad and any(parameter.requires_grad for parameter in tried.parameters()):
        raise ValueError(
            f"task: {config.task.type} gives a loss for {name} that has no gradient, as after detach() or no_grad(); "
            "allowed is one that torch can differentiate in the parameters"
        )
    _check_metrics(config, tried, batch, task)
    if not _same(given, batch):
        raise ValueError(
            f"model: {name} or the task changes the samples it is given, as x += 1 and nn.ReLU(inplace=True) do where "
            "they come first; the next pass would see other ones: let it work on a copy"
        )


def _same(batch: Batch, other: Batch) -> bool:
    pairs = zip(*([*part.all_inputs, part.targets] for part in (batch, other)), strict=True)
    return all(a is b or torch.equal(a, b) for a, b in pairs)


def _check_frozen(config: Config, name: str, model: nn.Module) -> None:
    """Whoever turns `requires_grad` off means something by it; what trains is said in one place."""
    frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    for phase in config.schedule():
        if clash := [key for key in frozen if matches(key, phase.trainable)]:
            raise ValueError(
                f"model: {name} turns requires_grad off for {clash[0]}, which trainable, {phase.trainable}, matches; "
                "give there patterns of what trains, or make a buffer (register_buffer) of what never does"
            )


def _check_metrics(config: Config, model: nn.Module, batch: Batch, task: Task) -> None:
    """A row of sums of another length would be spread over what is there."""
    name = config.task.type
    with torch.no_grad(), evaluating(model), _Explained(f"task: metrics of {name} cannot be taken of", batch):
        sums = task.metrics(model, batch)
    expected = [task.num_sums]
    if not isinstance(sums, torch.Tensor) or list(sums.shape) != expected:
        found = f"shape {list(sums.shape)}" if isinstance(sums, torch.Tensor) else f"a {type(sums).__name__}"
        raise ValueError(f"task: metrics of {name} gave {found}; allowed is a tensor of shape {expected}, its num_sums")
    summary = task.summarize(sums.double().cpu(), len(batch))
    for metric, value in summary.items():
        if not isinstance(value, (int, float)):
            raise ValueError(
                f"task: summarize of {name} gave a {type(value).__name__} for {metric}; allowed is a number: float(...)"
            )
    if (counted := headline_of(name)[0]) not in summary:
        raise ValueError(
            f"task: {name} counts {counted}, but its `summarize` gives {', '.join(summary) or 'nothing'}; let it give "
            "what its headline names"
        )
    if (listed := TASKS[name].metrics) and sorted(listed) != sorted(summary):
        raise ValueError(
            f"task: {name} is registered with metrics {', '.join(listed)}, but its `summarize` gives "
            f"{', '.join(summary)}; give both the same, or leave out those of `register`"
        )


def _check_types(config: Config, name: str, model: nn.Module) -> None:
    wanted = getattr(torch, config.runtime.dtype)
    for key, parameter in model.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"model: {name}: {key} has type {parameter.dtype}, in which small steps are lost and sums of clients' "
                "updates are rounded; allowed: float32, or float64 with runtime.dtype: float64"
            )
        if parameter.dtype not in (torch.float32, wanted):
            remedy = "; set runtime.dtype: float64" if parameter.dtype == torch.float64 else ""
            raise ValueError(f"model: {name}: {key} has type {parameter.dtype}; allowed is torch.float32{remedy}")


class _Explained:
    """An error of a model's or task's own, as one sentence about the samples that it was given."""

    def __init__(self, what: str, batch: Batch) -> None:
        self._what = what
        self._shapes = " and ".join(f"{list(part.shape[1:])} ({str(part.dtype)[6:]})" for part in batch.all_inputs)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        told = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError, AssertionError)
        if isinstance(error, told):
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(
                f"{self._what} inputs of shape {self._shapes}, which are the data set's: {reason}"
            ) from error
