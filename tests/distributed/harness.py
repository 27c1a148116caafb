"""Runs a function in several gloo processes: file rendezvous, time limit, every exit accounted for."""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fedspec_dist.distributed.collectives import Collectives, ProcessGroup, SingleProcess


class RankError(AssertionError):
    """Says which rank hung, died or raised, and why."""


def run_ranks(
    function: Callable[..., Any], num_ranks: int, folder: Path, *arguments: Any, timeout_s: float = 60
) -> list[Any]:
    """`function(collectives, *arguments)` on every rank; its results by rank. Function and results must pickle.

    Raises:
        RankError: any rank raised, exited otherwise, or was still running after `timeout_s`.
    """
    # A server that has imported torch once forks the ranks: seconds less for each than a fresh interpreter.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "fedspec_dist.distributed.update_matrix"])
    results = context.Queue()
    rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
    processes = [
        context.Process(target=_rank, args=(function, rank, num_ranks, str(rendezvous), results, arguments))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(processes: list[Any], results: Any, deadline: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(processes):
        while not results.empty():
            rank, error, value = results.get()
            if error:
                raise RankError(f"rank {rank} raised:\n{error}")
            found[rank] = pickle.loads(value)
        missing = [rank for rank in range(len(processes)) if rank not in found]
        for rank in missing:
            if processes[rank].exitcode not in (None, 0):
                time.sleep(0.3)  # its report may still be in the pipe
                if results.empty():
                    raise RankError(f"rank {rank} died with exit code {processes[rank].exitcode}")
        if missing and time.monotonic() > deadline:
            raise RankError(f"ranks {missing} still running at the time limit")
        time.sleep(0.01)
    for rank, process in enumerate(processes):
        process.join(max(deadline - time.monotonic(), 1))
        if process.exitcode != 0:
            raise RankError(f"rank {rank} ended with exit code {process.exitcode} after its result")
    return [found[rank] for rank in range(len(processes))]


def _rank(function: Any, rank: int, num_ranks: int, rendezvous: str, results: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        collectives: Collectives = SingleProcess()
        if num_ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=30),
            )
            dist.barrier()  # else a rank that is quickly done is gone while another still connects to it
            collectives = ProcessGroup(torch.device("cpu"))
        # By value: torch would pass tensors through memory that goes with this process.
        results.put((rank, None, pickle.dumps(function(collectives, *arguments))))
        if num_ranks > 1:
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
