"""What is learned. A task is told batches and the model, which it calls: a residual differentiates in the inputs."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from fedspec_dist.core.batch import Batch


class Task:
    """A task of a user's own defines `loss`, `metrics` and `summarize`, and names its headline and `num_sums`.

    One whose loss is of a model's outputs and the targets defines `output_loss` in place of `loss`: local methods that
    change outputs (FedLC) or take features (MOON) ask for that. One that defines `curvature` and `curvature_root` can
    be aggregated by FIPA and by the Fisher merge.
    """

    # Of `summarize`, and whether more is better. Those of the package have it beside their line in `methods.TASKS`.
    headline: ClassVar[tuple[str, Literal["max", "min"]]]
    num_sums: ClassVar[int]  # of `metrics`

    def check(self, data: Any) -> None:
        """Raises ValueError, naming `task`, unless the data set (`data.dataset.Dataset`) has what the task needs."""

    def check_outputs(self, model_name: str, outputs: Any, batch: Batch, num_outputs: int) -> None:
        """Raises ValueError, naming `model`, unless a model puts out what the loss takes; here, any tensor."""
        if not isinstance(outputs, Tensor):
            raise ValueError(f"model: {model_name} gives a {type(outputs).__name__}; allowed is a tensor")

    def check_curvature(self, data: Any) -> None:
        """Raises ValueError, naming `server.aggregator`, unless the loss on this data set has a curvature."""
        if not has_curvature(self):
            raise ValueError(
                f"server.aggregator: got one that needs the Fisher matrix, but the task {type(self).__name__} has no "
                "curvature and curvature_root; allowed: one without, such as fedavg, or give the task both"
            )

    def outputs(self, model: Any, batch: Batch) -> Tensor:
        """What curvature is about, `[B, C]`."""
        outputs: Tensor = batch.through(model)
        return outputs

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean over the batch, a scalar in the dtype of the model."""
        assert batch.targets is not None
        return self.output_loss(self.outputs(model, batch), batch.targets)

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The same, where it is a function of outputs and targets."""
        raise NotImplementedError

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each sample what it adds to the loss and how much it counts, `[B]` each: the loss is the sum of the former
        over that of the latter. Needed to train several clients at once with few launches."""
        raise NotImplementedError

    def metrics(self, model: Any, batch: Batch) -> Tensor:
        """Sums over the batch, `[num_sums]` float64: those of the blocks of a data set are added up, in order."""
        raise NotImplementedError

    def summarize(self, sums: Tensor, num_samples: int) -> dict[str, float]:
        """The metrics, by name, from the added-up sums of `num_samples` samples (at least one)."""
        raise NotImplementedError

    def curvature(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """`S_n T_n` for `tangents [B, C, l]`: `S_n [C, C]` is the Fisher matrix of a sample's outputs, which is the
        Hessian of its loss up to a factor that all samples share."""
        raise NotImplementedError

    def curvature_root(self, outputs: Tensor, jacobian: Tensor) -> Tensor:
        """`F_n J_n` for `jacobian [B, C, l]`, with `F_n^T F_n = S_n`."""
        raise NotImplementedError


def suited(targets: Tensor | None) -> str:
    """What targets are and which task of the package takes them, for a message about another one."""
    if targets is None:
        return "none; allowed with it: a task of your own, whose loss takes no targets (docs/your-own.md)"
    found = f"targets of shape {list(targets.shape)} and type {str(targets.dtype)[6:]}"
    if targets.dim() > 2:
        return f"{found}; allowed with them: a task of your own (docs/your-own.md)"
    if targets.is_floating_point():
        return f"{found}; allowed with real numbers: task regression"
    if targets.dim() == 2:
        return f"{found}; allowed with a class at each place: task language"
    return f"{found}; allowed with a class for each sample: task classification, or language"


def check_classes(task: str, targets: Tensor, num_classes: int, otherwise: str = "") -> None:
    """Raises ValueError, naming `task`, unless all targets are `0 .. num_classes - 1`."""
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < num_classes:
        raise ValueError(
            f"task: {task}: the targets range from {int(targets.min())} to {int(targets.max())}; allowed are 0 to "
            f"{num_classes - 1}{otherwise}"
        )


def has_curvature(task: Any) -> bool:
    """Whether a task, or its class, defines the curvature of its loss."""
    kind = task if isinstance(task, type) else type(task)
    return all(getattr(kind, name, base) is not base for name, base in _CURVATURE.items())


_CURVATURE = {"curvature": Task.curvature, "curvature_root": Task.curvature_root}
