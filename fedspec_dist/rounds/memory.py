"""How much memory a rank will hold, from what a round has alive at the same time: `--plan`, nothing is trained.

Numbers in the tables below were measured with torch 2.14 on a CPU, one thread; docs/running.md says how well they
foretell whole runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedspec_dist.clients.vectors import widths
from fedspec_dist.config import Choice, Config, Phase, methods
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.data.dataset import Examples
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.rounds.federation import Federation
from fedspec_dist.rounds.making import filtered_layers, make_algorithm
from fedspec_dist.rounds.stage import cut_columns
from fedspec_dist.rounds.statistics import Extras
from fedspec_dist.rounds.statistics import max_rank as max_rank_of

_FLOAT_BYTES = {"float32": 4, "float64": 8}
_PROCESS_BYTES = 560_000_000  # python with torch, once a model of any size has been trained
_CUDA_BYTES = 800_000_000  # a context with its kernels, and NCCL's buffers; an estimate, not measured
_FILTER_COPIES, _FILTER_KEEPS = 5, 1  # of the layers of one form, where a filter's class has no `copies`; and kept
# Of a rank's columns, in float32: the direction, the old and the new model, and what an optimizer makes in between;
# more of it where it divides one memory by another.
_STEP_COPIES, _STEP_COPIES_OF_TWO = 9, 13
# A large Gram matrix, and what is made of it while ranks add it up or the method reads it.
_GRAM_COPIES = {"fedgh": 1.5}
_SAMPLES_TRIED = 4


@dataclass(frozen=True)
class Work:
    """What a rank has to do in a round, as far as its memory depends on it."""

    cohort: int  # clients
    num_clients: int  # of them, that this rank trains
    largest_client: int  # samples
    states: int  # clients whose home it is
    population: int  # all clients
    extras: Extras = field(default_factory=Extras)  # what clients send besides their updates


@dataclass(frozen=True)
class Activations:
    """Bytes that a model takes for one sample."""

    trained: int  # kept for the backward pass
    evaluated: int  # of the largest layer, its input and output

    @classmethod
    def of(cls, module: nn.Module, examples: Examples) -> Activations:
        """Measured on some samples; the model is left as it was."""
        batch = examples.batch(
            torch.arange(min(_SAMPLES_TRIED, len(examples)))
        )  # in memory of its own, which is counted
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        kept: dict[int, int] = {}
        largest = [0]
        parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        def see(_: nn.Module, inputs: tuple[object, ...], outputs: object) -> None:
            sizes = [t.nbytes for t in (*inputs, outputs) if isinstance(t, Tensor)]
            largest[0] = max(largest[0], sum(sizes))

        handles = [layer.register_forward_hook(see) for layer in module.modules()]
        was_training = module.training
        with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module.train()
            outputs = batch.through(module)  # alive until all is counted: freed memory may be given out twice
        module.train(was_training)
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
        del outputs
        for handle in handles:
            handle.remove()
        return cls(sum(kept.values()) // len(batch), largest[0] // len(batch))


def held(
    config: Config,
    phase: Phase,
    layout: ParameterLayout,
    activations: Activations,
    federation: Federation,
    num_ranks: int,
    rank: int,
    work: Work,
) -> int:
    """Bytes that a rank holds at most, with its process and its share of the data set.

    That is what stays, and the largest of what is there besides while clients train, while rows are exchanged for
    columns, while the server works, while the model is tested and while a checkpoint is written. What clients keep is
    counted as once all have taken part.
    """
    shared = layout.shared
    columns = cut_columns(config, phase, len(shared), num_ranks, work.population)
    own = columns.count(rank) * columns.width
    extras = work.extras
    rank_of_sketches = extras.rank
    stays = _stays(phase, layout, columns, own, work)
    sent = 1 + extras.rows
    rows = work.num_clients * sent * columns.padded
    sketches = work.num_clients * rank_of_sketches * len(shared)  # at most; as the clients made them
    blocks = work.cohort * (sent + rank_of_sketches) * own
    moving = work.num_clients * max(1, rank_of_sketches) * columns.padded  # one matrix at a time
    arriving = work.cohort * max(1, rank_of_sketches) * own if num_ranks > 1 else 0
    moments = {
        "training": rows + sketches + _training(phase, layout),
        "exchange": rows + 3 * sketches + moving + arriving + blocks,
        "server": rows + 3 * sketches + blocks + _server(phase, own, work, rank_of_sketches),
        "checkpoint": 2 * sum(segment.size for segment in layout.segments) if rank == 0 else 0,
    }
    batch = max(phase.local.batch_size, 1) if work.num_clients else 0
    more = {
        "training": min(batch, work.largest_client) * activations.trained + extras.working_bytes(work.largest_client),
        "evaluation": config.eval.batch_size * activations.evaluated,
    }
    float_bytes = _FLOAT_BYTES[config.runtime.dtype]
    largest = max(float_bytes * moments.get(name, 0) + more.get(name, 0) for name in {*moments, *more})
    short = 8 * extras.short * (work.num_clients + 2 * work.cohort)  # as clients made them, gathered, and in order
    return float_bytes * stays + short + largest + data_bytes(federation) + _PROCESS_BYTES + _device_bytes(config)


def data_bytes(federation: Federation) -> int:
    """Of the data set as every rank has it; on CPUs, the ranks of a host share what was read from files."""
    return federation.dataset.train.nbytes + federation.dataset.test.nbytes


def _stays(phase: Phase, layout: ParameterLayout, columns: Columns, own: int, work: Work) -> int:
    """Float32 numbers that outlive a round: of the executor, the server and the clients, and the round's model."""
    algorithm = make_algorithm(phase)
    sent = [width for width in widths(algorithm.uploads).values() if width is None]
    named = len(algorithm.own) + len(sent) + 2 * len(algorithm.broadcast)
    vectors = (6 + bool(phase.local.momentum) + named) * len(layout)
    states = 2 * _num_states(phase)  # float64
    clients = (work.states + work.num_clients) * len(algorithm.own) * len(layout)
    filters = sum(_FILTER_KEEPS * _largest_form(choice, layout) for choice in (phase.filter, phase.server.filter))
    return vectors + (len(algorithm.server) + states) * own + clients + filters


def _training(phase: Phase, layout: ParameterLayout) -> int:
    """The gradient in its pieces, and a filter at work."""
    copies = getattr(methods.FILTERS[phase.filter.type].load(), "copies", _FILTER_COPIES)
    return len(layout) + copies * _largest_form(phase.filter, layout)


def _largest_form(choice: Choice, layout: ParameterLayout) -> int:
    """Numbers in the layers of one shape, which are filtered together."""
    if choice.type == "none":
        return 0
    forms: Counter[tuple[int, ...]] = Counter()
    for segment in filtered_layers(choice, layout):
        forms[segment.shape] += segment.size
    return max(forms.values(), default=0)


def _server(phase: Phase, own: int, work: Work, rank_of_sketches: int) -> int:
    copies = _STEP_COPIES if _num_states(phase) < 2 else _STEP_COPIES_OF_TWO
    pairs = (work.cohort * max(1, rank_of_sketches)) ** 2 if has_gram(phase) else 0
    return copies * own + int(2 * pairs * (1 + _GRAM_COPIES.get(phase.server.aggregator.type, 1.0)))


def _num_states(phase: Phase) -> int:
    """Vectors that the server's optimizer keeps."""
    choice = phase.server.optimizer
    return len(methods.SERVER_OPTIMIZERS[choice.type].build(**choice.parameters()).initial_state(0))


def has_gram(phase: Phase) -> bool:
    """Whether the aggregator asks for all inner products of updates, or of sketches."""
    return phase.server.aggregator.type == "fedgh" or bool(max_rank_of(phase))


def _device_bytes(config: Config) -> int:
    on_gpu = config.runtime.device == "cuda" or (config.runtime.device == "auto" and torch.cuda.is_available())
    return _CUDA_BYTES if on_gpu else 0
