"""Start and end of a job's processes: threads, device, process group, signals, failures."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from fedspec_dist.core.failures import Kind, kind_of
from fedspec_dist.distributed.collectives import CollectiveError, Collectives, ProcessGroup, SingleProcess
from fedspec_dist.processes.devices import choose_backend, choose_device
from fedspec_dist.processes.environment import Environment, LaunchError, tell_launcher
from fedspec_dist.processes.gpus import gpu_names, set_deterministic, set_precision
from fedspec_dist.processes.joining import come_together
from fedspec_dist.processes.memory import keep_freed_memory
from fedspec_dist.processes.rendezvous import part_of
from fedspec_dist.processes.stop import EXIT_STOPPED, StopRequest
from fedspec_dist.processes.watch import Watch

log = logging.getLogger(__name__)

# A store on a host that is gone must not hold up the message that says so.
_STORE_TIMEOUT_S = 10
# Ours is the limit that counts; the backend's only must not come first. It is for connecting the ranks.
_BACKEND_TIMEOUT = timedelta(days=365)
_set_backend_timeout = getattr(dist, "set_timeout", None) or _set_pg_timeout  # new in torch 2.14
# 128 + SIGINT, as shells have it.
EXIT_INTERRUPTED = 130
# What was asked for cannot be had: the same run would come to the same again.
EXIT_DIVERGED = 3


def exit_code(error: BaseException) -> int:
    return EXIT_DIVERGED if kind_of(error) is Kind.DIVERGED else 1


def _keep_to_itself(error: BaseException) -> None:
    """For who does not write failures down."""


@dataclass(frozen=True)
class Runtime:
    """What the rest of the program knows about the job."""

    environment: Environment
    device: torch.device
    backend: str
    collectives: Collectives
    stop: StopRequest

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def num_ranks(self) -> int:
        return self.environment.num_ranks

    @property
    def is_main(self) -> bool:
        return self.environment.rank == 0

    @property
    def prepares_data(self) -> bool:
        """One rank on each host."""
        return self.environment.local_rank == 0


def run(
    settings: Any,
    environment: Environment,
    body: Callable[[Runtime], int],
    debug: bool = False,
    folder: Path | None = None,
    record: Callable[[BaseException], None] = _keep_to_itself,
) -> int:
    """Run `body` on every rank and return the exit code; `settings` is the config's `runtime` section.

    `folder`, on a file system that all ranks share, is where they meet if the launcher gives no address. `record` is
    called with what ends this rank, on the rank where it began.

    A failure anywhere ends all ranks within seconds: the first rank to fail shows its message (a ValueError, made
    for the user, without traceback) and tells the others, which end quietly.
    """
    _set_threads(settings.threads_per_rank)
    keep_freed_memory()
    set_deterministic(settings.deterministic)
    device = choose_device(settings.device, environment)
    set_precision(settings.precision, device)
    num_visible = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.set_device(device)
    stop = StopRequest()

    def checked(runtime: Runtime) -> int:
        with torch.autograd.set_detect_anomaly(debug):  # of this run only
            return body(runtime)

    if not environment.launched or environment.num_ranks == 1:
        stop.install()
        try:
            alone = Runtime(environment, device, "none", SingleProcess(), stop)
            return guard(environment, lambda: checked(alone), record)
        finally:
            stop.uninstall()
    backend = choose_backend(settings.backend, device, environment, num_visible)
    with _process_group(backend, device, environment, settings, folder, stop, record) as (collectives, watch):
        try:
            code = checked(Runtime(environment, device, backend, collectives, stop))
            if code == EXIT_STOPPED:
                watch.learn_reason()
            if collectives.stuck:
                watch.close()
                _leave(code)
            return code
        except KeyboardInterrupt as interruption:
            if watch.report_failure("interrupted"):
                record(interruption)
            _leave(EXIT_INTERRUPTED)
        except Exception as error:
            _fail(error, environment, watch, record)


def guard(
    environment: Environment, body: Callable[[], int], record: Callable[[BaseException], None] = _keep_to_itself
) -> int:
    """The exit code of a body that needs no other rank; a failure is shown, and a second Ctrl-C ends it at once."""
    try:
        return body()
    except KeyboardInterrupt as interruption:
        record(interruption)
        log.error("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        record(error)
        _show(error, environment)
        return exit_code(error)


@contextlib.contextmanager
def _process_group(
    backend: str,
    device: torch.device,
    environment: Environment,
    settings: Any,
    folder: Path | None,
    stop: StopRequest,
    record: Callable[[BaseException], None],
) -> Iterator[tuple[ProcessGroup, Watch]]:
    gpu = gpu_names(device) if backend == "nccl" else ("", "")
    store, start = come_together(environment, settings.timeout_s, settings.interface, folder, gpu)
    rank, num_ranks = environment.rank, environment.num_ranks
    connection = part_of(store, start, "watch")
    connection.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
    watch = Watch(
        connection, rank, num_ranks, stop, lambda: collectives.current if collectives else "", settings.timeout_s
    )
    collectives: ProcessGroup | None = None
    watch.start()  # a rank may end while the backend connects the ranks, too
    _let_collectives_be_polled()
    try:
        dist.init_process_group(
            backend,
            store=part_of(store, start),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=settings.timeout_s),
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        watch.close()
        raise LaunchError(
            f"rank {rank} on {environment.host}: all ranks are there, but {backend} does not connect them ({error}). "
            "Name the network interface between the hosts with runtime.interface=NAME"
        ) from error
    _set_backend_timeout(_BACKEND_TIMEOUT)
    collectives = ProcessGroup(device if backend == "nccl" else torch.device("cpu"), watch.trouble)
    # Only now: until here signals end the process at once, even while it waits for ranks that never come.
    stop.install()
    yield collectives, watch
    # The store of a job that met by itself ends with rank 0.
    watch.close(last=rank == 0 and bool(environment.attempt))
    if not collectives.stuck:
        dist.destroy_process_group()


def _let_collectives_be_polled() -> None:
    """We end a wait ourselves, with a message; NCCL's own watchers would end the process without one."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"


def _fail(
    error: Exception, environment: Environment, watch: Watch, record: Callable[[BaseException], None]
) -> NoReturn:
    """Say what happened, once for the whole job, and leave without touching the process group again."""
    if isinstance(error, CollectiveError):
        # Another rank is gone; what it reported, or soon will, is the cause.
        elsewhere = watch.elsewhere()
        deadline = time.monotonic() + (0 if watch.knows_why else 3)
        while (failure := watch.failure()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if failure is not None:
            log.info("ending: rank %s on %s failed first", failure["rank"], failure["host"])
            log.debug("%s", _trace(error))
            # torchrun may take this rank's end for the cause, as it comes first.
            tell_launcher(f"rank {failure['rank']} on {failure['host']} failed: {failure['summary']}")
            _leave()
        if elsewhere:
            error = CollectiveError(f"{error}. Not there, so hung, slow or killed: {', '.join(elsewhere)}")
    if watch.report_failure(f"{type(error).__name__}: {error}"):
        record(error)
        _show(error, environment)
    else:
        log.debug("after another rank's failure: %s", _trace(error))
    # Let the others read the report before the store may vanish with this process.
    time.sleep(1.5)
    _leave(exit_code(error))


def _show(error: Exception, environment: Environment) -> None:
    """What we raised for the user stands alone, its traceback in the log file; anything else comes with it."""
    where = f"rank {environment.rank} on {environment.host}: " if environment.num_ranks > 1 else ""
    if isinstance(error, CollectiveError) or (isinstance(error, (ValueError, OSError)) and _is_ours(error)):
        log.error("%s%s", where, error)
        log.debug("%s", _trace(error))
        tell_launcher(f"{where}{error}")
    else:
        log.error("%s%s", where, _trace(error))
        tell_launcher(f"{where}{type(error).__name__}: {error}")


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def _is_ours(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])


def _leave(code: int = 1) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _set_threads(num_threads: int) -> None:
    """CPU kernels choose their splits, and so the last bits of their sums, by the number of threads."""
    torch.set_num_threads(num_threads)
    with contextlib.suppress(RuntimeError):  # can be set once per process
        torch.set_num_interop_threads(1)
