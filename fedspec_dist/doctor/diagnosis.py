"""What the facts of all ranks mean: one finding a check, and what to mend first. Pure functions, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fedspec_dist.doctor.facts import Facts, by_host, ranges
from fedspec_dist.doctor.folder import FolderFacts

OK: Final = "ok"
LOOK: Final = "look"  # a run works, but not as well as it could
MEND: Final = "mend"  # a run fails
State = Literal["ok", "look", "mend"]
_CLOCK_S = 2.0
_SLOW_TO_SEE_S = 1.0
_LITTLE_SPACE = 10**9
_SLOW_MB_S, _SLOW_US = 30.0, 20_000.0


@dataclass(frozen=True)
class Finding:
    check: str
    state: State
    says: str
    advice: str = ""


@dataclass(frozen=True)
class Findings:
    """All that the ranks found."""

    facts: Sequence[Facts]  # by rank
    folder: str
    folders: Sequence[FolderFacts]  # by rank
    unseen: Sequence[int] = ()  # ranks whose files rank 0 does not see
    clock_offsets_s: Sequence[float] = ()
    speeds: Sequence[Any] = ()  # probe.Speed
    speed_problem: str = ""
    wants_gpu: bool = False  # runtime.device: cuda


def diagnose(found: Findings) -> list[Finding]:
    return [check(found) for check in _CHECKS]


def verdict(findings: Sequence[Finding]) -> tuple[bool, str]:
    """Whether a run can be started, and what comes first."""
    to_mend = [finding for finding in findings if finding.state == MEND]
    to_look_at = [finding for finding in findings if finding.state == LOOK]
    if to_mend:
        first = to_mend[0]
        more = f" ({len(to_mend) - 1} more above)" if len(to_mend) > 1 else ""
        return False, f"not healthy. First thing to fix: {first.check}: {first.says}. {first.advice}{more}"
    if to_look_at:
        first = to_look_at[0]
        return True, f"healthy. What could be better: {first.check}: {first.says}. {first.advice}"
    return True, "healthy: nothing to fix"


# ------------------------------------------------------------------------------------------ the checks


def versions(found: Findings) -> Finding:
    for name in found.facts[0].versions:
        groups = _ranks_by(found.facts, lambda one, name=name: one.versions.get(name, "none"))  # type: ignore[misc]
        if len(groups) > 1:
            return Finding(
                "versions", MEND, f"{name} is {_listed(groups)}", "Activate the same Python environment on all hosts"
            )
    return Finding("versions", OK, ", ".join(f"{name} {text}" for name, text in found.facts[0].versions.items()))


def config(found: Findings) -> Finding:
    groups = _ranks_by(found.facts, lambda one: one.config)
    if len(groups) > 1:
        return Finding("config", MEND, f"its hash is {_listed(groups)}", "Start all ranks with the same file and keys")
    return Finding("config", OK, f"{found.facts[0].config}, the same on all ranks")


def devices(found: Findings) -> Finding:
    kinds = _ranks_by(found.facts, lambda one: one.device.split(":")[0])
    counts = "; ".join(
        f"{host}: {len(ranks)} rank(s), {ranks[0].gpus_visible} GPU(s) visible"
        for host, ranks in by_host(found.facts).items()
    )
    problems = [one for one in found.facts if one.backend_problem]
    if problems:
        return Finding("devices", MEND, f"rank {problems[0].rank}: {problems[0].backend_problem}", "A run would refuse")
    broken = [one for one in found.facts if one.gpu_problem]
    if broken:
        return Finding(
            "devices",
            MEND,
            f"rank {broken[0].rank} on {broken[0].host}: {broken[0].gpu_problem}",
            "Install a build of torch for this GPU (https://pytorch.org/get-started/locally), look at nvidia-smi, "
            "or set runtime.device=cpu",
        )
    if len(kinds) > 1:
        return Finding(
            "devices",
            MEND,
            f"some ranks have a GPU and some have none: {_listed(kinds)}",
            "Ask for as many GPUs on each node (--gpus-per-node), or set runtime.device=cpu",
        )
    if found.wants_gpu and "cpu" in kinds:
        return Finding(
            "devices", MEND, f"runtime.device is cuda but no GPU is visible; {counts}", "Ask for GPUs (--gpus-per-node)"
        )
    slices = shared_slices(found.facts)
    if slices and any(one.backend == "nccl" for one in slices):
        return Finding(
            "devices",
            MEND,
            f"slices (MIG) of one GPU are on {_hosts(slices)}, and NCCL takes them for the same GPU; {counts}",
            "Ask for whole GPUs, or let the ranks talk over gloo: runtime.backend=gloo",
        )
    gpus = [one.gpu for one in found.facts if one.gpu]
    if len(set(gpus)) < len(gpus):
        return Finding(
            "devices", LOOK, f"{len(gpus)} ranks share {len(set(gpus))} GPUs; {counts}", "One GPU a rank is faster"
        )
    idle = {host for host, r in by_host(found.facts).items() if r[0].gpus_visible > len(r) and r[0].gpus_visible > 1}
    if idle and gpus:
        return Finding("devices", LOOK, f"some GPUs have no rank; {counts}", "Start a rank for each GPU")
    alone = [host for host, ranks in by_host(found.facts).items() if len(ranks) > 1 and _sees_one_each(ranks)]
    if alone:
        return Finding(
            "devices",
            LOOK,
            f"on {', '.join(alone)} each rank sees no GPU but its own (--gpus-per-task); {counts}",
            "NCCL may then send through the host, or fail: prefer --gpus-per-node; a rank sees all and takes its own",
        )
    return Finding("devices", OK, counts)


def shared_slices(facts: Sequence[Facts]) -> list[Facts]:
    """The first ranks on one host whose GPUs have names of their own but one place on the bus."""
    places: dict[tuple[str, str], list[Facts]] = {}
    for one in facts:
        if one.gpu_on_bus:
            places.setdefault((one.host, one.gpu_on_bus), []).append(one)
    return next((ranks for ranks in places.values() if len({one.gpu for one in ranks}) > 1), [])


def _sees_one_each(ranks: Sequence[Facts]) -> bool:
    over_nccl = all(one.gpus_visible == 1 and one.backend == "nccl" for one in ranks)
    return over_nccl and len({one.gpu for one in ranks}) == len(ranks)


def cpus(found: Findings) -> Finding:
    texts = []
    for host, ranks in by_host(found.facts).items():
        available = {cpu for one in ranks for cpu in one.cpus}
        threads = sum(one.threads for one in ranks)
        texts.append(f"{host}: CPUs {ranges(available)} for {len(ranks)} rank(s), {ranks[0].threads} thread(s) each")
        if threads > len(available):
            return Finding(
                "CPUs",
                LOOK,
                f"{host}: {threads} threads of {len(ranks)} rank(s) on {len(available)} CPU(s)",
                "Ranks will wait for each other: ask for more (--cpus-per-rank), or lower runtime.threads_per_rank",
            )
    return Finding("CPUs", OK, "; ".join(texts))


def network(found: Findings) -> Finding:
    hosts = by_host(found.facts)
    if len(hosts) == 1:
        return Finding("network", OK, "one host")
    if all(one.interfaces == found.facts[0].interfaces for one in found.facts):
        return Finding("network", OK, "the hosts share one network stack")
    misleading = [host for host, ranks in hosts.items() if not ranks[0].name_leads_here]
    unset = [host for host in misleading if "GLOO_SOCKET_IFNAME" not in hosts[host][0].socket_variables]
    used = "; ".join(
        f"{host}: {' '.join(f'{n}={v}' for n, v in ranks[0].socket_variables.items()) or 'by its name'}"
        for host, ranks in hosts.items()
    )
    if unset:
        host = unset[0]
        resolved = ", ".join(hosts[host][0].name_resolves_to) or "nothing"
        return Finding(
            "network",
            LOOK,
            f"the name {host} resolves to {resolved} on that host, where others cannot reach it",
            "Name the interface between the hosts with runtime.interface=NAME; this one has "
            + ", ".join(hosts[host][0].interfaces),
        )
    return Finding("network", OK, used)


def ports(found: Findings) -> Finding:
    without = [one for one in found.facts if not one.port]
    if without:
        return Finding(
            "ports", MEND, f"rank {without[0].rank} on {without[0].host} can listen at no port", "Is it sandboxed?"
        )
    if any(one.port_is_ephemeral for one in found.facts):
        return Finding(
            "ports",
            LOOK,
            "all free ports are of the ephemeral range",
            "Narrow net.ipv4.ip_local_port_range, if you can",
        )
    return Finding("ports", OK, "free ones outside the ephemeral range on each host")


def speed(found: Findings) -> Finding:
    if found.speed_problem:
        return Finding(
            "collectives",
            MEND,
            found.speed_problem,
            "Name the interface between the hosts with runtime.interface=NAME; with NCCL, NCCL_DEBUG=INFO says more",
        )
    if not found.speeds:
        return Finding("collectives", OK, "one rank: nothing to exchange")
    says = "; ".join(f"{one.name} {one.latency_us:.0f} us, {one.megabytes_s:.0f} MB/s a rank" for one in found.speeds)
    if min(one.megabytes_s for one in found.speeds) < _SLOW_MB_S or max(o.latency_us for o in found.speeds) > _SLOW_US:
        return Finding(
            "collectives",
            LOOK,
            f"slow: {says}",
            "Busy CPUs, or not the fast network: compare runtime.interface=NAME for each interface",
        )
    return Finding("collectives", OK, says)


def run_folder(found: Findings) -> Finding:
    check, shared = "run folder", "Choose output=FOLDER on a file system that all hosts share and may write"
    for one, facts in zip(found.folders, found.facts, strict=True):
        if one.problem:
            return Finding(check, MEND, f"rank {facts.rank} on {facts.host} cannot write {one.problem}", shared)
    blind = [facts for one, facts in zip(found.folders, found.facts, strict=True) if not one.sees_others]
    if blind or found.unseen:
        where = _hosts(blind) if blind else _hosts([found.facts[rank] for rank in found.unseen])
        return Finding(
            check, MEND, f"{found.folder} is not the same folder on {found.facts[0].host} and {where}", shared
        )
    torn = [one for one in found.folders if one.renames_torn]
    if torn:
        return Finding(
            check,
            MEND,
            f"a file that was renamed over was torn in {torn[0].renames_torn} of {torn[0].reads} reads",
            "Checkpoints rely on whole renames: choose output=FOLDER on another file system",
        )
    missed = [one for one in found.folders if one.renames_missed]
    if missed:
        return Finding(
            check,
            LOOK,
            f"a file that was renamed over was not there in {missed[0].renames_missed} of {missed[0].reads} reads",
            "Network file systems may do that to other hosts; checkpoints have new names and do not mind",
        )
    free = min(one.free_bytes for one in found.folders)
    if free < _LITTLE_SPACE:
        return Finding(check, LOOK, f"{free / 1e6:.0f} MB are free in {found.folder}", "Free some space")
    slow = max(one.seconds_to_see for one in found.folders)
    if slow > _SLOW_TO_SEE_S:
        return Finding(check, LOOK, f"a new file is seen after {slow:.1f} s", "The file system is slow or busy")
    if not all(one.locks for one in found.folders):
        return Finding(
            check, LOOK, f"{found.folder} has no file locks", "Two jobs in one run folder would go unnoticed: avoid it"
        )
    return Finding(check, OK, f"{found.folder} is writable, shared, renames are whole, {free / 1e9:.0f} GB free")


def data(found: Findings) -> Finding:
    for one in found.facts:
        if not one.data_found or one.data_problem:
            state: State = LOOK if one.data_found else MEND
            return Finding("data set", state, f"on {one.host}: {one.data_problem}", "" if state == MEND else _DOWNLOAD)
    return Finding("data set", OK, "there")


_DOWNLOAD = "The run will download it; compute nodes often cannot: start it once where there is internet access"


def clocks(found: Findings) -> Finding:
    apart = max(map(abs, found.clock_offsets_s), default=0.0)
    if apart > _CLOCK_S:
        rank = max(range(len(found.clock_offsets_s)), key=lambda r: abs(found.clock_offsets_s[r]))
        return Finding(
            "clocks",
            LOOK,
            f"{found.facts[rank].host} is {found.clock_offsets_s[rank]:+.1f} s from {found.facts[0].host}",
            "Times in logs will mislead: tell the administrator (NTP)",
        )
    return Finding("clocks", OK, f"at most {1000 * apart:.1f} ms apart")


# What makes everything after it doubtful comes first.
_CHECKS: tuple[Callable[[Findings], Finding], ...] = (
    versions,
    config,
    devices,
    speed,
    run_folder,
    data,
    ports,
    network,
    cpus,
    clocks,
)


def _ranks_by(facts: Sequence[Facts], value: Callable[[Facts], str]) -> dict[str, list[Facts]]:
    groups: dict[str, list[Facts]] = {}
    for one in facts:
        groups.setdefault(value(one), []).append(one)
    return groups


def _listed(groups: dict[str, list[Facts]]) -> str:
    return ", ".join(f"{value} on {_hosts(ranks)}" for value, ranks in groups.items())


def _hosts(facts: Sequence[Facts]) -> str:
    return ", ".join(f"{host} (rank {ranges(one.rank for one in ranks)})" for host, ranks in by_host(facts).items())
