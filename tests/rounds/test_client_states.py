"""What clients keep: at home on any number of ranks, where it is needed when it is needed, whole in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedspec_dist.distributed.assignment import assign
from fedspec_dist.distributed.collectives import Collectives, SingleProcess
from fedspec_dist.rounds import client_states
from fedspec_dist.rounds.client_states import ClientStates
from tests.distributed.harness import run_ranks

NUM_CLIENTS, SIZE = 9, 10
# Cohorts of three rounds, and the positions whose clients reported.
ROUNDS: list[tuple[list[int], list[int]]] = [([0, 3, 4, 8], [0, 1, 3]), ([3, 4, 5], [0, 1, 2]), ([0, 3, 8], [0, 1, 2])]


def _after(client: int, before: Tensor | None) -> Tensor:
    """What a client keeps after a round, in which it must have been given what it kept before."""
    return torch.full((SIZE,), float(client)) if before is None else before * 10 + client


def _rounds(collectives: Collectives, states: ClientStates, rounds: list[tuple[list[int], list[int]]]) -> None:
    for cohort, kept in rounds:
        plan = assign([1.0 + client for client in cohort], collectives.num_ranks)
        fetched = states.fetch(cohort, plan)
        mine = [cohort[position] for position in plan[collectives.rank]]
        assert set(fetched) <= set(mine)
        states.store(cohort, plan, kept, {client: _after(client, fetched.get(client)) for client in mine})


def _everything(collectives: Collectives) -> dict[int, Tensor]:
    states = ClientStates(SIZE, torch.float32, NUM_CLIENTS, collectives)
    _rounds(collectives, states, ROUNDS)
    return {client: state for chunk in states.chunks() for client, state in chunk.items()}


# Client 4 did not report in the first round: what it then had is forgotten, and the second was its first.
EXPECTED = {0: 0.0, 3: 333.0, 4: 4.0, 5: 5.0, 8: 88.0}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_states_are_kept_and_found_again(num_ranks: int, tmp_path: Path) -> None:
    found = [_everything(SingleProcess())] if num_ranks == 1 else run_ranks(_everything, num_ranks, tmp_path)
    assert {client: float(state[0]) for client, state in found[0].items()} == EXPECTED
    assert all(torch.equal(state, torch.full((SIZE,), EXPECTED[client])) for client, state in found[0].items())
    assert all(other == {} for other in found[1:])


def _in_small_chunks(collectives: Collectives) -> list[list[int]]:
    client_states._CHUNK_BYTES = 2 * SIZE * 4
    states = ClientStates(SIZE, torch.float32, NUM_CLIENTS, collectives)
    _rounds(collectives, states, ROUNDS)
    return [list(chunk) for chunk in states.chunks()]


def test_chunks_are_bounded_and_in_order(tmp_path: Path) -> None:
    found = run_ranks(_in_small_chunks, 2, tmp_path)
    assert found == [[[0, 3], [4, 5], [8]], [[], [], []]]


def _resumed(collectives: Collectives, chunks: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    states = ClientStates(SIZE, torch.float32, NUM_CLIENTS, collectives)
    states.restore(chunks if collectives.rank == 0 else ())
    _rounds(collectives, states, ROUNDS[2:])
    return {client: state for chunk in states.chunks() for client, state in chunk.items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_states_go_on_at_another_number_of_ranks(num_ranks: int, tmp_path: Path) -> None:
    collectives = SingleProcess()
    before = ClientStates(SIZE, torch.float32, NUM_CLIENTS, collectives)
    _rounds(collectives, before, ROUNDS[:2])
    everyone = {client: state for chunk in before.chunks() for client, state in chunk.items()}
    chunks = [{client: everyone[client] for client in part} for part in ([0, 3], [4, 5, 8])]
    found = [_resumed(collectives, chunks)] if num_ranks == 1 else run_ranks(_resumed, num_ranks, tmp_path, chunks)
    assert {client: float(state[0]) for client, state in found[0].items()} == EXPECTED


class _Silent(SingleProcess):
    def all_gather(self, tensor: Tensor, what: str) -> Tensor:
        raise AssertionError(f"nothing should be sent: {what}")

    all_to_all = broadcast = all_gather  # type: ignore[assignment]


def test_methods_that_keep_nothing_send_nothing() -> None:
    states = ClientStates(0, torch.float32, NUM_CLIENTS, _Silent())
    states.restore([])
    assert states.fetch([1, 2], [[0, 1]]) == {}
    states.store([1, 2], [[0, 1]], [0, 1], {})
    assert list(states.chunks()) == []


def test_a_state_does_not_hold_on_to_what_came_with_it() -> None:
    collectives = SingleProcess()
    states = ClientStates(SIZE, torch.float32, NUM_CLIENTS, collectives)
    _rounds(collectives, states, [([1, 2, 3], [0, 1, 2])])
    (chunk,) = states.chunks()
    assert all(state.untyped_storage().nbytes() == state.nbytes for state in chunk.values())


def test_states_of_another_version_of_a_method_are_refused() -> None:
    states = ClientStates(SIZE, torch.float32, NUM_CLIENTS, SingleProcess())
    with pytest.raises(ValueError, match=r"has 5 numbers of client 3, .* has 10; start over"):
        states.restore([{3: torch.zeros(5)}])
