"""All ranks look around together; rank 0 reports. Every rank runs `examine`."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedspec_dist.config import Config, expand_home, methods
from fedspec_dist.data.files import DatasetNotFoundError
from fedspec_dist.distributed.collectives import CollectiveError, ProcessGroup
from fedspec_dist.doctor import folder as folders
from fedspec_dist.doctor.diagnosis import Finding, Findings, diagnose, shared_slices, verdict
from fedspec_dist.doctor.facts import Facts, allowed_cpus, versions
from fedspec_dist.doctor.folder import FolderFacts
from fedspec_dist.processes import interfaces, probe
from fedspec_dist.processes.devices import choose_backend, choose_device
from fedspec_dist.processes.environment import LaunchError
from fedspec_dist.processes.gpus import gpu_names, gpu_problem
from fedspec_dist.processes.meeting import is_ephemeral, listen
from fedspec_dist.processes.runtime import Runtime

_MESSAGE_BYTES = 4_000_000
# Well below the patience for what follows: a rank that fails here waits there for the others.
_MEASURE_S = 20.0
_STATES = {"ok": "ok", "look": "[yellow]look[/]", "mend": "[red]mend[/]"}

T = TypeVar("T")


def examine(config: Config, runtime: Runtime, console: Console) -> int:
    """The exit code: 0 if a run can be started."""
    collectives = runtime.collectives
    facts = _of_all(runtime, own_facts(config, runtime), Facts)
    shared, per_rank, unseen = _folder(config, runtime)
    speeds, problem = _speeds(runtime, facts)
    found = Findings(
        facts=facts,
        folder=shared,
        folders=per_rank,
        unseen=unseen,
        clock_offsets_s=probe.clock_offsets_s(collectives),
        speeds=speeds,
        speed_problem=problem,
        wants_gpu=config.runtime.device == "cuda",
    )
    findings = diagnose(found)
    healthy, says = verdict(findings)
    if runtime.is_main:
        print_findings(console, facts, findings, says)
    return 0 if healthy else 1


def own_facts(config: Config, runtime: Runtime) -> Facts:
    environment, known = runtime.environment, interfaces.interfaces()
    backend, problem, device = "gloo", "", runtime.device
    num_visible = torch.cuda.device_count() if device.type == "cuda" else 0
    try:
        if config.runtime.device != "cuda" or num_visible:
            device = choose_device(config.runtime.device, environment)
        backend = choose_backend(config.runtime.backend, device, environment, num_visible)
    except LaunchError as error:
        problem = str(error)
    resolved = interfaces.resolve(environment.host)
    with listen("") as listener:
        port = listener.getsockname()[1]
    data_found, data_problem = _data(config) if runtime.prepares_data else (True, "")
    cuda = torch.cuda.is_available()
    gpu, gpu_on_bus = gpu_names(device)
    return Facts(
        rank=runtime.rank,
        host=environment.host,
        local_rank=environment.local_rank,
        versions=versions(
            cuda=torch.version.cuda, nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None
        ),
        config=config.fingerprint(),
        device=str(device),
        gpu=gpu,
        gpu_on_bus=gpu_on_bus,
        gpu_problem=gpu_problem(device),
        gpus_visible=num_visible,
        backend=backend,
        backend_problem=problem,
        threads=torch.get_num_threads(),
        cpus=allowed_cpus(),
        name_resolves_to=resolved,
        name_leads_here=interfaces.leads_here(resolved, known),
        interfaces=known,
        socket_variables={n: os.environ[n] for n in (interfaces.GLOO, interfaces.NCCL) if n in os.environ},
        port=port,
        port_is_ephemeral=is_ephemeral(port),
        data_found=data_found,
        data_problem=data_problem,
    )


def _data(config: Config) -> tuple[bool, str]:
    """Whether a run would find the data set on this host, and what there is to say."""
    data = config.data
    entry = methods.DATASETS[data.dataset.type]
    try:
        root = Path(data.root) if getattr(entry.load(), "embedded", False) else expand_home("data.root", data.root)
        source = entry.build(root=root, download=data.download, seed=config.seed, **data.dataset.parameters())
        if not source.embedded:
            source.fingerprint()
    except DatasetNotFoundError as error:
        return source.download, str(error)
    except (ValueError, OSError) as error:
        return False, str(error)
    return True, ""


def _folder(config: Config, runtime: Runtime) -> tuple[str, list[FolderFacts], list[int]]:
    """The folder in which the run folder lies, or will; what each rank sees of it; whose files rank 0 does not see."""
    collectives, rank = runtime.collectives, runtime.rank
    token = probe.gather_texts(collectives, uuid.uuid4().hex)[0]
    shared = config.run_folder().absolute().parent
    folder = shared / f".doctor-{token[:8]}"
    problem = folders.make(folder) or folders.write(folder, rank, token) if runtime.is_main else ""
    problem = probe.gather_texts(collectives, problem)[0]
    if problem:
        return str(shared), [FolderFacts(problem=problem)] * runtime.num_ranks, []
    seen, seconds = folders.sees(folder, 0, token)
    if seen:
        problem = folders.write(folder, rank, token)
    probe.barrier(collectives, "writing into the run folder")
    unseen = folders.unseen(folder, runtime.num_ranks, token) if runtime.is_main else []
    unseen = json.loads(probe.gather_texts(collectives, json.dumps(unseen))[0])
    with folders.renaming(folder) if runtime.is_main else contextlib.nullcontext():
        reads, torn, missed = folders.read_while_renamed(folder)
        probe.barrier(collectives, "renaming in the run folder")
    mine = FolderFacts(
        problem=problem,
        sees_others=seen,
        seconds_to_see=seconds,
        renames_torn=torn,
        renames_missed=missed,
        reads=reads,
        locks=folders.can_lock(folder, rank),
        free_bytes=folders.free_bytes(folder),
    )
    everybody = _of_all(runtime, mine, FolderFacts)
    if runtime.is_main:
        folders.remove(folder)
    return str(shared), everybody, unseen


def _speeds(runtime: Runtime, facts: Sequence[Facts]) -> tuple[list[probe.Speed], str]:
    if runtime.num_ranks == 1:
        return [], ""
    backend = "nccl" if all(one.backend == "nccl" and not one.backend_problem for one in facts) else "gloo"
    if backend == "nccl" and len({one.gpu for one in facts}) < len(facts):
        return [], "NCCL cannot share a GPU between ranks, and some have the same"
    if backend == "nccl" and shared_slices(facts):
        return [], "NCCL cannot share a GPU between ranks, and some have slices (MIG) of the same"
    speeds, problem = [], ""
    try:
        assert isinstance(runtime.collectives, ProcessGroup)  # there are several ranks
        speeds = probe.measure(runtime.collectives, backend, runtime.device, _MESSAGE_BYTES, _MEASURE_S)
    except CollectiveError as error:
        problem = str(error)
    problems = probe.gather_texts(runtime.collectives, problem)
    return speeds, next(filter(None, problems), "")


def _of_all(runtime: Runtime, mine: T, form: type[T]) -> list[T]:
    text = json.dumps(asdict(mine))  # type: ignore[call-overload]
    return [form(**json.loads(other)) for other in probe.gather_texts(runtime.collectives, text)]


def print_findings(console: Console, facts: Sequence[Facts], findings: Sequence[Finding], says: str) -> None:
    hosts = list(dict.fromkeys(one.host for one in facts))
    table = Table(title=f"{len(facts)} rank(s) on {', '.join(hosts)}", title_justify="left")
    table.add_column("check")
    table.add_column("")
    table.add_column("found", overflow="fold")
    for finding in findings:
        table.add_row(finding.check, _STATES[finding.state], escape(finding.says))
    console.print(table)
    console.print(says, markup=False, highlight=False, soft_wrap=True)
