"""A phase at work: the methods that its config names, bound to the model and to this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedspec_dist.clients.algorithms.base import LocalAlgorithm
from fedspec_dist.clients.executors.base import BatchOf, ClientWork, Executor, Kept, Rows, Sent
from fedspec_dist.clients.executors.batched import BatchedExecutor
from fedspec_dist.clients.executors.groups import groups
from fedspec_dist.clients.executors.sequential import SequentialExecutor
from fedspec_dist.clients.statistics.base import Collector
from fedspec_dist.clients.vectors import widths
from fedspec_dist.config import Config, Phase, methods
from fedspec_dist.core.batch import Batch
from fedspec_dist.core.buffers import MovingBuffers, moving_buffers
from fedspec_dist.core.cohort import Clients, Proxy
from fedspec_dist.core.parameters import ParameterLayout
from fedspec_dist.data.dataset import Examples
from fedspec_dist.data.images.augment import Augmentation
from fedspec_dist.distributed.assignment import assign
from fedspec_dist.distributed.collectives import Collectives
from fedspec_dist.distributed.columns import Columns
from fedspec_dist.processes.gpus import spare_memory
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.rounds.client_states import ClientStates
from fedspec_dist.rounds.federation import Federation
from fedspec_dist.rounds.making import (
    make,
    make_algorithm,
    make_attack,
    make_filter,
    make_local_methods,
    make_task,
    trial,
)
from fedspec_dist.rounds.phase_check import kept_ranges
from fedspec_dist.rounds.proxy import ServerProxy, balanced_subset, class_of, proxy_share, quota
from fedspec_dist.rounds.sampling import Workload, client_work, workload
from fedspec_dist.rounds.server import FederatedServer
from fedspec_dist.rounds.server_memory import ServerMethods
from fedspec_dist.rounds.statistics import build_statistics, material, max_rank


class Stage:
    """Executor, server and client states of one phase. A new phase starts with empty memories.

    `theta [P]` is the model between rounds: first what is shared, which the server moves, then what trains and is not,
    which stays as it was made and is where a client starts that has nothing of its own.
    """

    def __init__(
        self, config: Config, phase: Phase, module: nn.Module, federation: Federation, runtime: Runtime
    ) -> None:
        self.phase = phase
        self._config = config
        self._federation = federation
        self._module = module
        self.task = make_task(config, federation.dataset)
        self.layout = ParameterLayout(module, phase.trainable, phase.server.shared)
        self.augmentation = Augmentation.from_entries([entry.model_dump() for entry in config.data.augment])
        self._algorithm = make_algorithm(phase)
        self.attack = make_attack(config)
        train = federation.dataset.train
        names = moving_buffers(module, trial(federation.dataset))
        self._moving = MovingBuffers(module, names) if names else None
        if self._moving is not None and config.model.buffers == "freeze":
            self._moving.hold()
        moves = self._moving is not None and config.model.buffers != "freeze"
        self._drops_single = moves
        keeps = moves and config.model.buffers == "local"
        num_moving, num_averaged = (0, 0) if self._moving is None else (self._moving.size, self._moving.num_averaged)
        self.kept = Kept(
            len(self._algorithm.own),
            len(self.layout),
            kept_ranges(phase, self.layout),
            num_moving if keeps else 0,
        )
        self._num_averaged = num_averaged if moves and not keeps else 0
        self._stint_ranges = [
            self.layout.ranges(stint.train, f"local.schedule.{number}.train")
            for number, stint in enumerate(phase.local.schedule)
        ]
        aggregator = make(methods.AGGREGATORS, phase.server.aggregator)
        shared = self.layout.shared
        self.max_rank = max_rank(phase)
        spare = spare_memory(runtime.device, runtime.environment) if self.max_rank else 0
        given = material(config, phase, module, self.layout, federation.dataset, self.task, spare)
        made = build_statistics(phase, given)
        statistics = Collector(made, module, len(shared)) if made else None
        local = make_local_methods(phase, self.layout, self._algorithm)
        batch_of = image_batches(self.augmentation, train) if federation.dataset.are_images else plain_batches(train)
        self.executor: Executor
        if config.runtime.executor == "batched":
            size = config.runtime.clients_per_batch
            self.executor = BatchedExecutor(
                module, self.layout, self.task, local, batch_of, self.kept, size, statistics
            )
        else:
            self.executor = SequentialExecutor(
                module, self.layout, self.task, local, batch_of, self.kept, self._moving, statistics
            )
        self.theta = self.layout.flatten(module)
        of_statistics = {name: each.width for name, each in made.items() if not each.is_matrix}
        self._widths = widths(self._algorithm.uploads) | of_statistics
        self.columns = cut_columns(config, phase, len(shared), runtime.num_ranks, len(federation.clients))
        self.server = FederatedServer(
            ServerMethods(
                make(methods.WEIGHTS, phase.server.weights),
                aggregator,
                self._algorithm,
                make_filter(phase.server.filter, shared) if phase.server.filter.type != "none" else None,
                make(methods.SERVER_OPTIMIZERS, phase.server.optimizer),
                [make(methods.TRANSFORMS, choice) for choice in phase.server.transforms],
            ),
            shared,
            self.columns,
            runtime.collectives,
            runtime.device,
            [len(samples) for samples in federation.clients],
            dtype=self.theta.dtype,
            seed=config.seed,
            proxy=self._proxy(module) if proxy_share(phase) else None,
            test_class_counts=federation.test_class_counts,
        )
        self.states = ClientStates(self.kept.size, self.theta.dtype, len(federation.clients), runtime.collectives)

    def sent(self, round_index: int) -> Sent:
        """What the clients of a round start from."""
        return Sent(
            self.theta,
            self.lr(round_index),
            round_index,
            self._config.seed,
            self.server.memory.broadcast,
            None if self._moving is None else self._moving.read(self.theta),
        )

    def rows(self, num_clients: int) -> Rows:
        """Room for the results of so many clients."""

        def table(width: int, dtype: torch.dtype | None = None) -> Tensor:
            return self.theta.new_zeros(num_clients, width, dtype=dtype)

        padded = self.columns.padded
        return Rows(
            table(padded),
            {name: table(padded) for name, width in self._widths.items() if width is None},
            {name: table(width, torch.float64) for name, width in self._widths.items() if width is not None},
            table(self._num_averaged) if self._num_averaged else None,
        )

    def work(self, round_index: int, client: int, load: Workload, state: Tensor | None) -> ClientWork:
        federation = self._federation
        return client_work(
            self._config.seed,
            round_index,
            client,
            federation.clients[client],
            federation.class_counts[client],
            load,
            self.augmentation,
            self.theta.device,
            state,
            self._stint_ranges,
        )

    def move(self, shared: Tensor, buffers: Tensor | None) -> None:
        """Take the server's new model, `[P_shared]`, and the mean of the clients' buffers, if they are averaged."""
        self.theta[: self.layout.num_shared].copy_(shared)
        self.executor.show(self.theta, buffers)

    @contextmanager
    def shown(self, sent: Sent) -> Iterator[Callable[[int], None]]:
        """Gives what lets the module be a client's own, of those at home on this rank; then it is the global one."""

        def show(client: int) -> None:
            theta, buffers = sent.theta, sent.buffers
            state = self.states.at_home(client)
            if state is not None and self.kept.size:
                theta, state = theta.clone(), state.to(theta.device)
                self.kept.place(state, theta)
                own = self.kept.unpack(state)[2]
                buffers = own if len(own) else buffers
            self.executor.show(theta, buffers)

        try:
            yield show
        finally:
            self.executor.show(sent.theta, sent.buffers)

    def lr(self, round_index: int) -> float:
        """`lr * lr_decay^t`, t counting rounds over all phases."""
        return float(self.phase.local.lr * self.phase.local.lr_decay**round_index)

    def loads(self, round_index: int, cohort: Sequence[int]) -> list[Workload]:
        """What each client of the cohort will do."""
        counts = self._federation.num_samples(cohort)
        key = (self._config.seed, self.phase.local, round_index)
        pairs = zip(cohort, counts, strict=True)
        return [workload(*key, client, count, self._drops_single) for client, count in pairs]

    def plan(self, loads: Sequence[Workload], num_ranks: int) -> list[list[int]]:
        """Positions in the cohort for each rank; a group of the batched executor is dealt out whole."""
        costs = [cost(self._algorithm, load) for load in loads]
        return plan(self._config, costs, num_ranks)

    def clients(self, round_index: int, cohort: Sequence[int], loads: Sequence[Workload]) -> Clients:
        """What every rank knows of the cohort, whoever trains it."""
        lr, momentum = self.lr(round_index), self.phase.local.momentum
        steps = [load.num_steps for load in loads]
        return Clients(
            ids=torch.tensor(cohort, dtype=torch.int64),
            num_samples=torch.tensor(self._federation.num_samples(cohort), dtype=torch.int64),
            class_counts=torch.from_numpy(self._federation.class_counts[np.array(cohort, dtype=np.int64)]),
            num_steps=torch.tensor(steps, dtype=torch.int64),
            effective_steps=torch.tensor(
                [self._algorithm.effective_steps(count, lr, momentum) for count in steps], dtype=torch.float64
            ),
            lr=lr,
            population=len(self._federation.population),
            proximal=self._algorithm.proximal,
        )

    def _proxy(self, module: nn.Module) -> Callable[[int, Collectives], Proxy]:
        examples = self._federation.proxy
        assert examples is not None
        # The largest share of any phase was held out; this one may want less.
        own, test = class_of(examples), class_of(self._federation.dataset.test)
        places = balanced_subset(own, quota(np.concatenate([own, test]), proxy_share(self.phase)))
        examples = examples.select(torch.from_numpy(places))
        batch_size = getattr(self.phase.server.weights, "batch_size", len(examples))
        layout, seed = self.layout.shared, self._config.seed
        return partial(ServerProxy, module, layout, self.task, examples, batch_size, seed)


def image_batches(augmentation: Augmentation, examples: Examples) -> BatchOf:
    """Batches of images, augmented where there are draws."""
    images, targets = examples.inputs[0], examples.targets
    assert targets is not None
    return lambda index, draws: Batch(augmentation.gather(images, index, draws), targets.index_select(0, index))


def plain_batches(examples: Examples) -> BatchOf:
    return lambda index, _: examples.batch(index)


def plan(config: Config, costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Which rank trains which clients of a round, by what each of them costs."""
    if config.runtime.executor != "batched":
        return assign(costs, num_ranks)
    made = groups(len(costs), config.runtime.clients_per_batch)
    # A group takes as long as its slowest client.
    dealt = assign([len(group) * max(costs[p] for p in group) for group in made], num_ranks)
    return [[position for number in sorted(numbers) for position in made[number]] for numbers in dealt]


def cost(algorithm: LocalAlgorithm, load: Workload) -> float:
    """The samples that a client will see, as often as they pass through the model."""
    return load.samples_seen * algorithm.passes + load.num_samples * algorithm.needs_full_gradient


def cut_columns(config: Config, phase: Phase, num_parameters: int, num_ranks: int, num_clients: int) -> Columns:
    """The column blocks of a phase's matrices, and who owns them."""
    cut = Columns.gathered if config.runtime.aggregation == "gather" else Columns.shared
    return cut(num_parameters, num_ranks, max_rank(phase) * config.cohort_size(num_clients))
