"""Which phase a round belongs to, and the stage that works in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor, nn

from fedspec_dist.config import Config, Phase
from fedspec_dist.core.draws import keyed
from fedspec_dist.processes.runtime import Runtime
from fedspec_dist.rounds.federation import Federation
from fedspec_dist.rounds.phase_check import check_patterns
from fedspec_dist.rounds.stage import Stage


def phase_of_round(phases: Sequence[Phase], round_index: int) -> int:
    """The number of the phase of a round; both count from 0."""
    ends = list(accumulate(phase.rounds for phase in phases))
    return next(number for number, end in enumerate(ends) if round_index < end)


class Phases:
    """Makes the stage of each phase when its first round comes; the model passes from one to the next."""

    def __init__(
        self,
        config: Config,
        module: nn.Module,
        federation: Federation,
        runtime: Runtime,
        first: int = 0,
        first_phase: int = 0,
    ) -> None:
        with keyed(runtime.device, config.seed, "methods"):
            check_patterns(config, module, federation.dataset)
        self.module = module
        self.first = first  # rounds that came before, in other runs
        self.first_phase = first_phase  # and phases: what a method draws when it is made is keyed by the phase
        self.last = first + config.rounds
        self._config = config
        self._federation = federation
        self._runtime = runtime
        self._schedule = config.schedule()
        self._current = -1
        self._stage: Stage | None = None

    def number(self, round_index: int) -> int:
        return phase_of_round(self._schedule, round_index - self.first)

    def enter(self, round_index: int) -> Stage:
        """The stage of this round. A new one starts from the parameters that the module then has."""
        number = self.number(round_index)
        if number != self._current or self._stage is None:
            with keyed(self._runtime.device, self._config.seed, "methods", self.first_phase + number):
                self._stage = Stage(self._config, self._schedule[number], self.module, self._federation, self._runtime)
            self._current = number
        return self._stage

    def resume(
        self,
        completed: int,
        server_state: Mapping[str, Tensor],
        client_states: Iterable[Mapping[int, Tensor]],
        carries_on: bool = False,
    ) -> None:
        """Go on after `completed` rounds; what server and clients remember outlives a round but not its phase.

        `carries_on`: the first phase here goes on with the last one of the run that this one branched from.
        `client_states` is looked at on rank 0 only.
        """
        begun = self.first < completed < self.last and self.number(completed) == self.number(completed - 1)
        if begun or (carries_on and completed == self.first):
            stage = self.enter(completed)
            stage.server.memory.load(server_state)
            stage.states.restore(client_states)
