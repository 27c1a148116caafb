"""Putting a run, or many as one job array, where there is room for them; and what that would be, as text.

Nothing here imports torch: it runs on login nodes. What is submitted is the resolved config, a copy of which is in
`submission/` of the run folder.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspec_dist.config import Config, ConfigError
from fedspec_dist.runs.safe_files import read_text
from launch import queue
from launch.cluster import (
    ROOT,
    Layout,
    check,
    check_after,
    check_path,
    check_signal,
    layout,
    sbatch_parameters,
    sbatch_text,
    setup_lines,
)
from launch.commands import command
from launch.follow import outcome, queue_state
from launch.outcomes import in_use
from launch.record import Record, SubmissionFolder, new_name, write, write_runs
from launch.start import SubmitError, run_here, sbatch, start_here


@dataclass(frozen=True)
class Submission:
    """A job in the queue, or, with `--cluster debug`, one that has run: then `exit_code` is its."""

    run_folder: Path
    cluster: str
    job_id: str
    log: Path  # of rank 0
    exit_code: int | None = None


def submit(
    config: Config,
    arguments: Sequence[str],
    cluster: str,
    after: str | None = None,
    time_limit: bool = True,
    fresh: bool = False,
    doctor: bool = False,
    accept_changes: bool = False,
) -> Submission:
    """Submit one run; `arguments` are what `fedspec_dist.main` would be given for it, for the record.

    `time_limit=False` lets a local job run as long as it takes; `doctor` submits the health check instead of the run.

    Raises:
        ConfigError: the `cluster` section does not fit this cluster.
        SubmitError: the run is in the queue already, or the scheduler refused.
    """
    shape = check(config, cluster)
    if cluster == "local" and time_limit:
        check_signal(config.cluster)
    check_after(config.cluster, cluster, after)
    files = _files(config, doctor)
    folder = files.jobs / new_name()
    _refuse_twice([files])
    with _nothing_left_when_refused([files], folder):
        _prepare([files], [(config, arguments)], cluster, fresh)
        job = _job(files, config, cluster, doctor, accept_changes)
        write_runs(folder, [files.run_folder])
        if cluster == "debug":
            job_id, log, code = run_here(folder, job)
            return Submission(files.run_folder, cluster, job_id, log, code)
        if cluster == "local":
            job_id = start_here(folder, config, shape, job, time_limit)
        else:
            (job_id,) = sbatch(folder, config, config.name, after, [job])
    return _submitted(files, folder, job_id, cluster, config, shape)


def submit_array(
    entries: Sequence[tuple[Config, Sequence[str]]], name: str = "sweep", accept_changes: bool = False
) -> list[Submission]:
    """Submit many runs to SLURM as one job array, at most `cluster.array_parallelism` of them at once.

    More runs than an array of the site can have are several arrays; with `array_parallelism` each of them waits for the
    one before. Skipping finished runs is the caller's; a run that is in the queue is refused.

    Raises:
        ConfigError: the runs ask for different resources, or two of them are the same run.
        SubmitError: one of them is in the queue already, or the scheduler refused. What it has taken by then stays
            submitted; of the others nothing is left behind.
    """
    if not entries:
        return []
    configs = [config for config, _ in entries]
    check(configs[0], "slurm")
    _check_alike(configs)
    all_files = [_files(config, doctor=False) for config in configs]
    check_path("output", all_files[0].run_folder.parent)
    _refuse_twice(all_files)
    done: list[Submission] = []
    for part in parts(len(entries)):
        after = done[-1].job_id.partition("_")[0] if done and configs[0].cluster.array_parallelism else None
        try:
            done += _submit_part(all_files[part], entries[part], name, after, accept_changes)
        except SubmitError as error:
            if done:
                raise SubmitError(f"{error}. {len(done)} of {len(entries)} runs were submitted before that") from error
            raise
    return done


def parts(count: int) -> list[slice]:
    """So many runs cut into arrays that the site allows."""
    size = queue.max_array_size()
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _submit_part(
    all_files: Sequence[SubmissionFolder],
    entries: Sequence[tuple[Config, Sequence[str]]],
    name: str,
    after: str | None,
    accept_changes: bool,
) -> list[Submission]:
    """One job array."""
    configs = [config for config, _ in entries]
    folder = all_files[0].run_folder.parent / ".arrays" / new_name()
    with _nothing_left_when_refused(all_files, folder):
        _prepare(all_files, entries, "slurm", fresh=False)
        jobs = [
            _job(files, config, "slurm", False, accept_changes)
            for files, config in zip(all_files, configs, strict=True)
        ]
        write_runs(folder, [files.run_folder for files in all_files])
        job_ids = sbatch(folder, configs[0], name, after, jobs)
    shape = layout(configs[0].cluster)
    return [
        _submitted(files, folder, job_id, "slurm", config, shape)
        for files, job_id, config in zip(all_files, job_ids, configs, strict=True)
    ]


@contextlib.contextmanager
def _nothing_left_when_refused(all_files: Sequence[SubmissionFolder], folder: Path) -> Iterator[None]:
    """Take back what was written for a submission that did not come about; what was there before stays."""
    new = [files for files in all_files if not files.path.exists()]
    try:
        yield
    except SubmitError:
        for path in (folder, *(files.path for files in new)):
            shutil.rmtree(path, ignore_errors=True)
        for path in (folder.parent, *(files.run_folder for files in new)):
            with contextlib.suppress(OSError):  # not empty: a run was there before its first submission
                path.rmdir()
        raise


def _check_alike(configs: Sequence[Config]) -> None:
    first = configs[0].cluster.model_dump()
    for config in configs:
        check(config, "slurm")
        different = [key for key, value in config.cluster.model_dump().items() if value != first[key]]
        if different:
            raise ConfigError(
                f"cluster.{different[0]}: differs between the runs of one job array "
                f"({first[different[0]]!r} and {config.cluster.model_dump()[different[0]]!r}); give all the same"
            )
    folders = [config.run_folder() for config in configs]
    twice = {folder for folder in folders if folders.count(folder) > 1}
    if twice:
        raise ConfigError(f"{min(twice)}: two runs of the job array are the same run; let a seed or a setting differ")


def plan(config: Config, cluster: str, after: str | None, time_limit: bool, doctor: bool) -> str:
    """What `submit` would do, and for SLURM the text that sbatch would get."""
    shape = check(config, cluster)
    check_after(config.cluster, cluster, after)
    files = _files(config, doctor)
    run_arguments = shlex.join(["python", "-m", f"fedspec_dist.{'doctor' if doctor else 'main'}", str(files.config)])
    lines = [
        f"run folder   {files.run_folder}",
        f"cluster      {cluster}",
        f"ranks        {shape.ranks}: {shape.ranks_per_node} on each of {shape.nodes} node(s), " + _gpus(config, shape),
        f"time limit   {config.cluster.time if cluster == 'slurm' or time_limit else 'none'}",
        f"each rank    {run_arguments}",
    ]
    if cluster == "slurm":
        folder = files.jobs / "DATE-TIME"
        setup = setup_lines(sys.executable, ROOT, folder)
        text = sbatch_text(sbatch_parameters(config.cluster, config.name, setup, after), sys.executable, folder)
        lines += ["", "sbatch would get:", "", text.rstrip()]
    return "\n".join(lines)


def _gpus(config: Config, layout: Layout) -> str:
    if layout.gpus_per_node:
        return f"{layout.gpus_per_node} GPU(s) a node"
    asked = [key for key in config.cluster.extra if key.startswith(("gpu", "gres", "tres"))]
    return f"GPUs as --extra {asked[0]} says" if asked else "no GPUs asked for"


# ------------------------------------------------------------------------------------------ steps


def _files(config: Config, doctor: bool) -> SubmissionFolder:
    run_folder = config.run_folder().absolute()
    check_path("output", run_folder)
    # A health check beside a run must not be taken for it.
    return SubmissionFolder(run_folder / "doctor" if doctor else run_folder)


def _prepare(
    all_files: Sequence[SubmissionFolder], entries: Sequence[tuple[Config, Sequence[str]]], cluster: str, fresh: bool
) -> None:
    """The records of what is submitted; before, with `fresh`, everything of the runs but that is deleted."""
    from fedspec_dist.runs.folder import RunFolder, git_state

    git = json.dumps(git_state(ROOT), indent=1) + "\n"
    for files, (config, arguments) in zip(all_files, entries, strict=True):
        try:
            if fresh and files.run_folder.exists():
                folder = RunFolder(files.run_folder)
                folder.open(fresh=True)
                folder.close()
            write(files.config, config.to_yaml())
            module = ["python", "-m", "fedspec_dist.main", *arguments]
            write(files.command, f"{shlex.join([sys.executable, *sys.argv])}\n{shlex.join(module)}\n")
            write(files.git, git)
            files.cancelled.unlink(missing_ok=True)
        except OSError as error:
            raise SubmitError(
                f"output: the run folder {files.run_folder} cannot be written: {error.strerror}; choose another "
                "output=FOLDER, on a file system that the nodes share"
            ) from error
        except ValueError as error:  # a run that was started by hand is at work there
            raise SubmitError(str(error)) from error


def _refuse_twice(all_files: Sequence[SubmissionFolder]) -> None:
    """Raises:
    SubmitError: one of the runs is at work or in the queue.
    """
    records = [files.record() for files in all_files]
    slurm = queue.slurm_states(record.job_id for record in records if record and record.cluster == "slurm")
    for files, record in zip(all_files, records, strict=True):
        folder = shlex.quote(str(files.run_folder))
        if record is not None:
            state = slurm[record.job_id] if record.cluster == "slurm" else queue_state(record)
            if state.is_alive and state.name != queue.UNKNOWN:
                raise SubmitError(
                    f"{files.run_folder} is job {record.job_id} already ({state.name}). Follow it with "
                    f"{command('follow')} {folder}, end it with {command('cancel')} {folder}, or give this run another "
                    "name= or output="
                )
            if state.is_alive and outcome(files, record, state) is None:
                raise SubmitError(
                    f"{files.run_folder} may still be job {record.job_id} ({state.reason}). If you know that it has "
                    f"ended, delete {files.job}"
                )
        if in_use(files.run_folder):
            raise SubmitError(
                f"{files.run_folder} is at work already, in {read_text(files.run_folder / '.lock').strip()}; wait for "
                "it, stop it, or give this run another name= or output="
            )


def _job(files: SubmissionFolder, config: Config, cluster: str, doctor: bool, accept_changes: bool) -> Any:
    from launch.job import Job, Rules

    asked = config.cluster
    rules = Rules(asked.max_requeues, asked.time, asked.signal_before_s)
    arguments = [str(files.config)]
    if not doctor:
        arguments += ["--debug"] * (cluster == "debug") + ["--accept-changes"] * accept_changes
    return Job(files.run_folder, arguments, rules, cluster, "doctor" if doctor else "main")


def _submitted(
    files: SubmissionFolder, folder: Path, job_id: str, cluster: str, config: Config, layout: Layout
) -> Submission:
    record = Record(
        job_id=job_id,
        cluster=cluster,
        folder=str(folder),
        ranks=layout.ranks,
        nodes=layout.nodes,
        time=config.cluster.time,
        host=socket.gethostname(),
        submitted=time.time(),
    )
    files.write_record(record)
    return Submission(files.run_folder, cluster, job_id, record.log())
