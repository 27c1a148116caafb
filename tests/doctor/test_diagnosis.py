"""What the doctor concludes from the facts of all ranks, and what comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedspec_dist.doctor.diagnosis import Finding, Findings, diagnose, verdict
from fedspec_dist.doctor.facts import Facts
from fedspec_dist.doctor.folder import FolderFacts
from fedspec_dist.processes.probe import Speed

GB = 10**9


def _rank(rank: int, **more: object) -> Facts:
    """Four ranks with a GPU each, on two hosts."""
    facts = Facts(
        rank=rank,
        host=f"node{rank // 2 + 1}",
        local_rank=rank % 2,
        versions={"python": "3.11.7", "torch": "2.14.1"},
        config="abcd1234",
        device=f"cuda:{rank % 2}",
        gpu=f"GPU-{rank}",
        gpus_visible=2,
        backend="nccl",
        cpus=[2 * rank, 2 * rank + 1],
        name_resolves_to=[f"10.0.0.{rank // 2 + 1}"],
        interfaces={"lo": ["127.0.0.1"], "eth0": [f"10.0.0.{rank // 2 + 1}"]},
        port=21000,
    )
    return replace(facts, **more)  # type: ignore[arg-type]


RANKS = [_rank(rank) for rank in range(4)]
SPEEDS = [Speed("all-to-all", 50.0, 900.0), Speed("all-gather", 60.0, 800.0)]
FOLDERS = [FolderFacts(reads=100, free_bytes=50 * GB)] * 4
HEALTHY = Findings(RANKS, "/shared/runs", FOLDERS, clock_offsets_s=[0.0, 0.001, -0.002, 0.0], speeds=SPEEDS)


def _with(rank: int, **more: object) -> Findings:
    return replace(HEALTHY, facts=[*RANKS[:rank], _rank(rank, **more), *RANKS[rank + 1 :]])


def _with_folder(rank: int, **more: object) -> Findings:
    changed = replace(FOLDERS[rank], **more)  # type: ignore[arg-type]
    return replace(HEALTHY, folders=[*FOLDERS[:rank], changed, *FOLDERS[rank + 1 :]])


def _all(**more: object) -> Findings:
    return replace(HEALTHY, facts=[_rank(rank, **more) for rank in range(4)])


def _found(findings: Findings, check: str) -> Finding:
    (finding,) = [finding for finding in diagnose(findings) if finding.check == check]
    return finding


def test_a_healthy_job() -> None:
    findings = diagnose(HEALTHY)
    assert {finding.state for finding in findings} == {"ok"}
    assert verdict(findings) == (True, "healthy: nothing to fix")
    assert _found(HEALTHY, "CPUs").says == (
        "node1: CPUs 0-3 for 2 rank(s), 1 thread(s) each; node2: CPUs 4-7 for 2 rank(s), 1 thread(s) each"
    )
    assert _found(HEALTHY, "devices").says == ("node1: 2 rank(s), 2 GPU(s) visible; node2: 2 rank(s), 2 GPU(s) visible")
    assert "all-to-all 50 us, 900 MB/s a rank" in _found(HEALTHY, "collectives").says


TO_MEND = [
    (
        "versions",
        _with(2, versions={"python": "3.11.7", "torch": "2.9.0"}),
        "torch is 2.14.1 on node1 (rank 0-1), node2 (rank 3), 2.9.0 on node2 (rank 2)",
        "Activate the same Python environment on all hosts",
    ),
    ("versions", _with(1, versions={"python": "3.11.7"}), "torch is 2.14.1 on .*, none on node1 (rank 1)", ""),
    ("config", _with(3, config="ffff0000"), "its hash is abcd1234 on .*, ffff0000 on node2 (rank 3)", "the same file"),
    (
        "devices",
        _with(3, device="cpu", gpu=""),
        "some ranks have a GPU and some have none: .*cpu on node2 (rank 3)",
        "GPU",
    ),
    ("devices", _with(1, backend_problem="2 ranks but 1 GPU"), "rank 1: 2 ranks but 1 GPU", "A run would refuse"),
    (
        "devices",
        replace(_all(device="cpu", gpu="", gpus_visible=0), wants_gpu=True),
        "runtime.device is cuda but no GPU is visible; node1: 2 rank(s), 0 GPU",
        "--gpus-per-node",
    ),
    (
        "devices",
        _with(2, gpu_problem="a step on NVIDIA X fails: no kernel image"),
        "rank 2 on node2: a step on NVIDIA X fails: no kernel image",
        "runtime.device=cpu",
    ),
    (
        "devices",
        _all(gpu_on_bus="00:1b:00"),
        "slices (MIG) of one GPU are on node1 (rank 0-1), and NCCL takes them for the same",
        "runtime.backend=gloo",
    ),
    (
        "collectives",
        replace(HEALTHY, speed_problem="gloo does not work"),
        "gloo does not work",
        "runtime.interface=NAME",
    ),
    (
        "run folder",
        _with_folder(0, problem="/x: Permission denied"),
        "rank 0 on node1 cannot write /x: Perm",
        "output=FOLDER",
    ),
    (
        "run folder",
        _with_folder(2, sees_others=False),
        "/shared/runs is not the same folder on node1 and node2 (rank 2)",
        "a file system that all hosts share",
    ),
    ("run folder", replace(HEALTHY, unseen=[3]), "is not the same folder on node1 and node2 (rank 3)", "output=FOLDER"),
    ("run folder", _with_folder(1, renames_torn=3), "torn in 3 of 100 reads", "another file system"),
    (
        "data set",
        _with(2, data_found=False, data_problem="data.dataset: x is in none"),
        "on node2: data.dataset: x is",
        "",
    ),
    ("ports", _with(2, port=0), "rank 2 on node2 can listen at no port", "sandboxed"),
]


@pytest.mark.parametrize(("check", "findings", "says", "advice"), TO_MEND)
def test_what_keeps_a_run_from_working(check: str, findings: Findings, says: str, advice: str) -> None:
    finding = _found(findings, check)
    assert finding.state == "mend"
    assert all(part in finding.says for part in says.split(".*"))
    assert advice in finding.advice
    healthy, text = verdict(diagnose(findings))
    assert not healthy
    assert text.startswith(f"not healthy. First thing to fix: {check}: {finding.says}. {finding.advice}")


TO_LOOK_AT = [
    ("devices", _with(1, gpu="GPU-0"), "4 ranks share 3 GPUs", "One GPU a rank is faster"),
    ("devices", _all(gpus_visible=4), "some GPUs have no rank; node1: 2 rank(s), 4 GPU(s)", "a rank for each GPU"),
    (
        "devices",
        _all(gpus_visible=1),
        "on node1, node2 each rank sees no GPU but its own (--gpus-per-task)",
        "prefer --gpus-per-node",
    ),
    ("CPUs", _all(threads=3), "node1: 6 threads of 2 rank(s) on 4 CPU(s)", "--cpus-per-rank"),
    ("CPUs", _all(cpus=[5]), "node1: 2 threads of 2 rank(s) on 1 CPU(s)", "runtime.threads_per_rank"),
    (
        "network",
        _all(name_leads_here=False, name_resolves_to=["127.0.1.1"]),
        "the name node1 resolves to 127.0.1.1 on that host, where others cannot reach it",
        "runtime.interface=NAME; this one has lo, eth0",
    ),
    ("network", _all(name_leads_here=False, name_resolves_to=[]), "resolves to nothing", "runtime.interface=NAME"),
    ("ports", _with(0, port_is_ephemeral=True), "of the ephemeral range", "ip_local_port_range"),
    (
        "collectives",
        replace(HEALTHY, speeds=[Speed("all-gather", 50, 3)]),
        "slow: all-gather 50 us, 3 MB/s",
        "interface",
    ),
    ("collectives", replace(HEALTHY, speeds=[Speed("all-gather", 9e4, 300)]), "slow: all-gather 90000 us", "Busy CPUs"),
    ("run folder", _with_folder(1, renames_missed=2), "was not there in 2 of 100 reads", "do not mind"),
    ("run folder", _with_folder(0, free_bytes=5_000_000), "5 MB are free in /shared/runs", "Free some space"),
    ("run folder", _with_folder(3, seconds_to_see=2.5), "a new file is seen after 2.5 s", "slow or busy"),
    ("run folder", _with_folder(3, locks=False), "/shared/runs has no file locks", "Two jobs in one run folder"),
    ("data set", _with(0, data_problem="data.dataset: x is in none"), "on node1: data.dataset: x", "will download it"),
    ("clocks", replace(HEALTHY, clock_offsets_s=[0, 0, -7.5, 0]), "node2 is -7.5 s from node1", "NTP"),
]


@pytest.mark.parametrize(("check", "findings", "says", "advice"), TO_LOOK_AT)
def test_what_could_be_better(check: str, findings: Findings, says: str, advice: str) -> None:
    finding = _found(findings, check)
    assert finding.state == "look"
    assert says in finding.says
    assert advice in finding.advice
    healthy, text = verdict(diagnose(findings))
    assert healthy
    assert text.startswith(f"healthy. What could be better: {check}: ")


def test_hosts_that_were_told_their_interface_are_fine() -> None:
    found = _all(name_leads_here=False, socket_variables={"GLOO_SOCKET_IFNAME": "eth0"})
    assert _found(found, "network") == Finding(
        "network", "ok", "node1: GLOO_SOCKET_IFNAME=eth0; node2: GLOO_SOCKET_IFNAME=eth0"
    )


def test_emulated_hosts_reach_each_other_over_loopback() -> None:
    found = _all(name_leads_here=False, name_resolves_to=["127.0.0.11"], interfaces={"lo": ["127.0.0.1"]})
    assert _found(found, "network") == Finding("network", "ok", "the hosts share one network stack")


def test_one_rank_has_no_network() -> None:
    alone = Findings([_rank(0)], "runs", FOLDERS[:1])
    assert _found(alone, "network").says == "one host"
    assert _found(alone, "collectives").says == "one rank: nothing to exchange"
    # One GPU of two visible would idle.
    assert verdict(diagnose(alone))[0]


def test_of_several_problems_the_one_that_makes_others_doubtful_comes_first() -> None:
    both = replace(_with(1, config="x"), speed_problem="gloo does not work", clock_offsets_s=[9])
    assert "First thing to fix: config: " in verdict(diagnose(both))[1]
    assert verdict(diagnose(both))[1].endswith("(1 more above)")
