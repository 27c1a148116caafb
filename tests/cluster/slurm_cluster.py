"""A real SLURM on this one machine: munged, slurmctld and a slurmd for each of a few emulated nodes, as root on Debian.

    python -m tests.cluster.slurm_cluster start|stop|run [--root FOLDER] [COMMAND ...]      in the checkout

Everything lives in namespaces of its own. One for processes, whose first process is `hold` below: when that one ends,
for whatever reason, the kernel ends every daemon and every job in it, so nothing can be left behind. One for mounts,
with its own /etc/hosts and /etc/slurm. And one for the network and the host name of each node, joined by a bridge: the
nodes are hosts with an address each, login 10.77.0.1, node1 10.77.0.11, node2 10.77.0.12, and no way out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

EXIT_CANNOT_BE_HAD = 77  # what automake's test harness takes for "skipped"
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2")
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "ip", "unshare", "nsenter", "mknod")
POLICY = Path("/usr/sbin/policy-rc.d")
CHECKOUT = Path(__file__).parents[2]
_SBIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_S = 45.0
# What a surrounding job or test must not hand on to the cluster's daemons and commands.
_FOREIGN = ("SLURM", "SBATCH", "SRUN", "SQUEUE", "SINFO", "SUBMITIT", "TORCHELASTIC", "MASTER_", "RANK", "LOCAL_RANK")


class CannotBeHad(RuntimeError):  # noqa: N818 - not an error: the tests are skipped
    """SLURM cannot be had on this machine; the message says why."""


class ClusterError(RuntimeError):
    """SLURM is installed but does what it should not; the message has the ends of its logs."""


@dataclass(frozen=True)
class Settings:
    nodes: int = 2
    cpus: int = 4  # that each node claims to have, whatever the machine has
    mem_mb: int = 8192
    gpus: int = 2  # fake ones
    signal_before_preemption: bool = True  # a site's choice, and not SLURM's default: then SIGTERM comes first
    job_id: int = 1000  # the first: submitit takes an old job's result file for that of a new one with the same id


def slurm_conf(root: Path, settings: Settings) -> str:
    """No cgroups, no accounting; a job in `main` preempts one in the other partitions.

    `low` gives its jobs 20 s and requeues them, `abrupt` gives none, and `revoked` cancels its jobs.
    """
    nodes = f"node[1-{settings.nodes}]"
    gres = f" Gres=gpu:{settings.gpus}" if settings.gpus else ""
    # With it the job's own --signal goes before SIGTERM, GraceTime earlier.
    preemption = "SlurmctldParameters=preempt_send_user_signal\n" if settings.signal_before_preemption else ""
    return f"""\
ClusterName=fedspec
SlurmctldHost=login(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits, 120 s by default
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={root}/log/jobs.txt
MpiDefault=none
FirstJobId={settings.job_id}
# what can never run is refused instead of waiting for ever
EnforcePartLimits=ALL
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=256
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{preemption}JobRequeue=1
KillWait=5
UnkillableStepTimeout=30
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
GresTypes=gpu
NodeName={nodes} CPUs={settings.cpus} RealMemory={settings.mem_mb}{gres} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=abrupt Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=revoked Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=20
"""


def addresses(settings: Settings) -> dict[str, str]:
    """Host name -> address."""
    return {"login": "10.77.0.1"} | {f"node{i}": f"10.77.0.{10 + i}" for i in range(1, settings.nodes + 1)}


def require(timeout_s: float = 300) -> None:
    """Install what is missing.

    Raises:
        CannotBeHad: not root, no namespaces, no apt-get, or it cannot install SLURM.
    """
    if os.geteuid() != 0:
        raise CannotBeHad("SLURM is started as root only, and this is not root")
    try:
        command = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "true"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    except subprocess.CalledProcessError as error:
        raise CannotBeHad(f"no namespaces on this machine: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBeHad(f"no namespaces on this machine: {error}") from error
    if missing():
        _install(timeout_s)
    if missing():
        raise CannotBeHad(f"installed, but not found: {', '.join(missing())}")


def missing() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=_SBIN) is None]


def _install(timeout_s: float) -> None:
    if shutil.which("apt-get") is None:
        raise CannotBeHad(f"no apt-get to install {', '.join(missing())} with")
    deadline = time.monotonic() + timeout_s
    install = ["apt-get", "install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=60", *PACKAGES]
    with _no_services():
        for command in (install, ["apt-get", "update"], install):
            try:
                result = subprocess.run(
                    command,
                    env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=max(1.0, deadline - time.monotonic()),
                )
            except subprocess.TimeoutExpired as error:
                raise CannotBeHad(f"{' '.join(command[:2])} took longer than {timeout_s:.0f} s") from error
            if command is install and result.returncode == 0:
                return
    raise CannotBeHad(f"apt-get could not install {', '.join(PACKAGES)}: {(result.stderr or result.stdout)[-500:]}")


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """Debian starts an installed daemon at once unless this file forbids it."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


class Cluster:
    """One cluster below `root`. `start` it, or take one that runs (`Cluster(root)` of a started root)."""

    def __init__(self, root: Path, settings: Settings | None = None) -> None:
        self.root = root
        self.settings = settings or Settings(job_id=1000 + int(time.time()) % 50_000_000)

    # --- start and stop

    def start(self, tied: bool = True) -> Cluster:
        """Return once all nodes are idle.

        Args:
            tied: the cluster ends with this process, however that ends; else it runs until `stop`.

        Raises:
            CannotBeHad: see `require`.
            ClusterError: it did not come up, or not within 45 s.
        """
        require()
        if len(str(self.root)) > 80:
            raise ClusterError(f"{self.root} is too long for a Unix socket in it")
        self._write_files()
        names = ["--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--propagation", "private"]
        hold = [sys.executable, __file__, "hold", str(self.root), str(self.settings.nodes), "tied" if tied else "free"]
        with (self.root / "log" / "hold.log").open("w") as log:
            self._unshare = subprocess.Popen(
                ["unshare", *names, *hold],
                stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_clean_environment() | {"PATH": _SBIN, "FEDSPEC_SLURM": str(self.root)},
                cwd="/",
                start_new_session=True,
            )
        try:
            self._wait_until_idle(time.monotonic() + _START_S)
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_until_idle(self, deadline: float) -> None:
        pid = None
        while pid is None:
            pid = _only_child(self._unshare.pid)
            self._check_start(deadline)
            time.sleep(0.02)
        (self.root / "run" / "hold.json").write_text(json.dumps([pid, _started_at(pid)]))
        while not (self.root / "run" / "ready").exists():
            self._check_start(deadline)
            time.sleep(0.05)
        while (states := self.states()) != dict.fromkeys(self.nodes, "idle"):
            self._check_start(deadline, f"; nodes: {states}")
            time.sleep(0.2)

    def _check_start(self, deadline: float, state: str = "") -> None:
        if self._unshare.poll() is not None:
            raise ClusterError(f"SLURM did not start\n{self.logs()}")
        if time.monotonic() > deadline:
            raise ClusterError(f"SLURM did not start within {_START_S:.0f} s{state}\n{self.logs()}")

    def _write_files(self) -> None:
        for name in ("etc", "log", "run", "state", "spool", "dev", "munge"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        (self.root / "munge").chmod(0o755)
        key = self.root / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(64))
        (self.root / "etc" / "slurm.conf").write_text(slurm_conf(self.root, self.settings))
        hosts = "".join(f"{address} {name}\n" for name, address in addresses(self.settings).items())
        (self.root / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{hosts}")
        # A fake GPU has to be a device: these are twins of /dev/null.
        for gpu in range(self.settings.gpus):
            subprocess.run(["mknod", "-m", "666", str(self.root / "dev" / f"nvidia{gpu}"), "c", "1", "3"], check=True)
        files = f"{self.root}/dev/nvidia[0-{self.settings.gpus - 1}]"
        gres = f"NodeName=node[1-{self.settings.nodes}] Name=gpu File={files}\n" if self.settings.gpus else ""
        (self.root / "etc" / "gres.conf").write_text(gres)

    def stop(self) -> None:
        """Also after a crash, and twice. Everything of the cluster is gone when this returns."""
        pid = self._hold()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 20
            while self._hold() is not None and time.monotonic() < deadline:
                time.sleep(0.05)
            if self._hold() is not None:
                raise ClusterError(f"process {pid}, which holds the cluster in {self.root}, does not end")
        with contextlib.suppress(AttributeError):
            self._unshare.kill()
            self._unshare.wait(10)
        (self.root / "run" / "hold.json").unlink(missing_ok=True)

    def _hold(self) -> int | None:
        """The first process of the cluster's own process namespace, as this side numbers it."""
        try:
            pid, started = json.loads((self.root / "run" / "hold.json").read_text())
        except (OSError, ValueError):
            return None
        return pid if _started_at(pid) == started else None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- use

    @property
    def nodes(self) -> list[str]:
        return [f"node{i}" for i in range(1, self.settings.nodes + 1)]

    def command(self, *words: str, folder: Path | None = None) -> list[str]:
        """`words` as a command that can be started from outside and runs on the login node."""
        pid = self._hold()
        if pid is None:
            raise ClusterError(f"no cluster runs in {self.root}\n{self.logs()}")
        enter = ["nsenter", "-t", str(pid), "--net", "--mount", "--pid", "--uts", f"--wdns={folder or Path.cwd()}"]
        return [*enter, "--", *words]

    def start_command(self, *words: str, folder: Path | None = None, **options: object) -> subprocess.Popen[str]:
        """Like `subprocess.Popen` on the login node, with a clean environment; `variables` are added to it."""
        variables: dict[str, str] = options.pop("variables", {})  # type: ignore[assignment]
        options = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True} | options
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:{_SBIN}"
        environment = _clean_environment() | {"PATH": path, "PYTHONPATH": str(CHECKOUT)} | variables
        return subprocess.Popen(self.command(*words, folder=folder), cwd=folder, env=environment, **options)  # type: ignore[call-overload]

    def run(
        self,
        *words: str,
        folder: Path | None = None,
        timeout_s: float = 60,
        check: bool = True,
        variables: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A command on the login node; its output is in `stdout`, both streams together.

        Raises:
            AssertionError: with `check`, another exit code than 0; and always after `timeout_s`.
        """
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "variables": variables or {}}
        with self.start_command(*words, folder=folder, **pipes) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                # nsenter waits for its child in the other process namespace; the whole session has to go.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                raise AssertionError(f"still running after {timeout_s} s: {' '.join(words)}\n{output}") from None
        assert not check or process.returncode == 0, f"exit {process.returncode}: {' '.join(words)}\n{output}"
        return subprocess.CompletedProcess(words, process.returncode, output)

    def lines(self, *words: str) -> list[str]:
        return self.run(*words, timeout_s=20).stdout.splitlines()

    def states(self) -> dict[str, str]:
        """Node -> what sinfo says of it, empty while slurmctld does not answer."""
        result = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t", timeout_s=20, check=False)
        pairs = [line.split() for line in result.stdout.splitlines()]
        return dict(pairs) if result.returncode == 0 and all(len(pair) == 2 for pair in pairs) else {}

    def submit(self, *words: str, folder: Path, **variables: str) -> str:
        """The job id of `sbatch words`."""
        result = self.run("sbatch", "--parsable", *words, folder=folder, variables=variables)
        return result.stdout.split()[-1].split(";")[0]

    def state(self, job: str) -> str:
        """What squeue says of a job, such as PENDING, RUNNING, COMPLETED, FAILED."""
        lines = self.lines("squeue", "-h", "--states=all", "-j", job, "-o", "%T")
        return lines[0] if lines else "GONE"

    def wait_for(self, job: str, *states: str, timeout_s: float = 60) -> str:
        """Wait until the job is in one of `states`, and return it."""
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            if time.monotonic() > deadline:
                self.run("scancel", job, check=False)
                shown = self.run("scontrol", "show", "job", job, check=False).stdout
                raise AssertionError(f"job {job} is {state}, not {' or '.join(states)}, after {timeout_s} s\n{shown}")
            time.sleep(0.3)
        return state

    def clear(self) -> None:
        """No jobs, all nodes idle: between two tests."""
        self.run("scancel", "--user", "root", check=False)
        deadline = time.monotonic() + 40
        while self.lines("squeue", "-h") or set(self.states().values()) != {"idle"}:
            if time.monotonic() > deadline:
                raise ClusterError(f"not idle again: {self.states()}\n{self.lines('squeue')}\n{self.logs()}")
            time.sleep(0.2)

    def kill_node(self, node: str) -> None:
        """As by a power cut: no slurmd, no job step and no task there any more. SLURM notices later."""
        self._inside("kill_node", node)

    def start_node(self, node: str) -> None:
        self._inside("start_node", node)

    def processes(self, node: str | None = None) -> dict[int, str]:
        """Process id in the cluster -> command line, of the jobs' processes on a node or on all."""
        found = [json.loads(line) for line in self._inside("show_processes").splitlines()]
        return {pid: command for pid, where, command in found if node in (None, where)}

    def _inside(self, function: str, *arguments: str) -> str:
        return self.run(sys.executable, __file__, function, str(self.root), *arguments, timeout_s=20).stdout

    def logs(self, lines: int = 12) -> str:
        texts = []
        for path in sorted((self.root / "log").glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            texts += [f"--- {path.name}", *tail]
        return "\n".join(texts)


def _clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}


def _started_at(pid: int) -> str | None:
    """With the process id it names a process for good; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _only_child(parent: int) -> int | None:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError, ValueError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                return int(entry.name)
    return None


# --- inside the namespaces


def hold(root: Path, nodes: str, tie: str) -> None:
    """The first process of the cluster: start the daemons, then take in orphans until the tie is cut."""
    num_nodes, tied = int(nodes), tie == "tied"
    _sh("mount -t proc proc /proc")
    _sh("mkdir -p /etc/slurm")
    _sh(f"mount --bind {root}/etc /etc/slurm")
    _sh(f"mount --bind {root}/etc/hosts /etc/hosts")
    _sh("hostname login")
    _sh("ip link set lo up")
    _sh("ip link add bridge type bridge")
    _sh("ip addr add 10.77.0.1/24 dev bridge")
    _sh("ip link set bridge up")
    _daemon(
        f"munged --socket={root}/munge/socket --key-file={root}/munge/key --log-file={root}/log/munged.log "
        f"--pid-file={root}/run/munged.pid --seed-file={root}/munge/seed"
    )
    for number in range(1, num_nodes + 1):
        _node(root, number)
    _daemon("slurmctld")
    for number in range(1, num_nodes + 1):
        start_node(root, f"node{number}")
    (root / "run" / "ready").touch()
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        ready, _, _ = select.select([sys.stdin] if tied else [], [], [], 0.2)
        if ready and not os.read(sys.stdin.fileno(), 1):
            return


def _node(root: Path, number: int) -> None:
    """A host: a network with one cable to the bridge, a host name, and a process that keeps both."""
    name = f"node{number}"
    keeper = subprocess.Popen(["unshare", "--net", "--uts", "sleep", "infinity"])
    (root / "run" / f"{name}.keeper").write_text(str(keeper.pid))
    while os.readlink(f"/proc/{keeper.pid}/ns/uts") == os.readlink("/proc/self/ns/uts"):
        time.sleep(0.01)
    _sh(f"ip link add {name} type veth peer name eth0 netns {keeper.pid}")
    _sh(f"ip link set {name} master bridge up")
    inside = f"nsenter -t {keeper.pid} --net --uts "
    for command in (
        f"hostname {name}",
        "ip link set lo up",
        f"ip addr add 10.77.0.{10 + number}/24 dev eth0",
        "ip link set eth0 up",
    ):
        _sh(inside + command)


def start_node(root: Path, node: str) -> None:
    keeper = (root / "run" / f"{node}.keeper").read_text()
    (root / "spool" / node).mkdir(exist_ok=True)
    _daemon(f"nsenter -t {keeper} --net --uts slurmd -N {node}")


def kill_node(root: Path, node: str) -> None:
    keeper = (root / "run" / f"{node}.keeper").read_text()
    network = os.readlink(f"/proc/{keeper}/ns/net")
    for _ in range(2):  # again for what was being forked
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if pid != keeper and os.readlink(f"/proc/{pid}/ns/net") == network:
                    os.kill(int(pid), signal.SIGKILL)


def show_processes(root: Path) -> None:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                variables = dict(item.partition("=")[::2] for item in _words(entry / "environ"))
                command = " ".join(_words(entry / "cmdline"))
                if command and "SLURMD_NODENAME" in variables:
                    print(json.dumps([int(entry.name), variables["SLURMD_NODENAME"], command]))


def _words(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def _sh(command: str) -> None:
    result = subprocess.run(command.split(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    if result.returncode:
        sys.exit(f"{command}: exit {result.returncode}: {result.stderr}")


def _daemon(command: str) -> None:
    """A command that goes to the background by itself. Pipes would stay open, and its end never be seen."""
    print(socket.gethostname(), command, flush=True)
    code = subprocess.run(command.split(), stdin=subprocess.DEVNULL, timeout=30).returncode
    if code:
        sys.exit(f"{command}: exit {code}")


INSIDE: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (hold, start_node, kill_node, show_processes)
}


def main() -> int:
    if sys.argv[1:] and sys.argv[1] in INSIDE:
        INSIDE[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("start", "stop", "run"):
        action = actions.add_parser(name)
        action.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "fedspec-slurm")
    actions.choices["start"].add_argument("--nodes", type=int, default=2)
    actions.choices["run"].add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    options = parser.parse_args()
    settings = Settings(getattr(options, "nodes", 2), job_id=1000 + int(time.time()) % 50_000_000)
    cluster = Cluster(options.root, settings)
    try:
        if options.action == "run":
            return subprocess.call(cluster.command(*options.words), env=_clean_environment())
        cluster.stop()
        if options.root.exists() and (options.root / "etc" / "slurm.conf").exists():
            shutil.rmtree(options.root)
        if options.action == "start":
            cluster.start(tied=False)
            start = f"{sys.executable} -m tests.cluster.slurm_cluster run --root {options.root}"
            print(f"{options.nodes} nodes are idle; in {CHECKOUT}: {start} COMMAND ...")
    except CannotBeHad as reason:
        print(f"SLURM cannot be had here: {reason}", file=sys.stderr)
        return EXIT_CANNOT_BE_HAD
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
