"""A private Slurm on this machine.

Own munge, slurmctld, and a slurmd per virtual node with 8 fake GPUs, in process, mount and network
namespaces of its own: every node has its own host name and address, the last one is bad (its
/dev/shm has 4 MB), and nothing can be left behind.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.ranks import ROOT, rank_environment

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
NAMESPACES = ["unshare", "--pid", "--fork", "--mount-proc", "--uts", "--net", "--kill-child"]
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
"""States of jobs that have ended; a job that is requeued is COMPLETING, then PENDING."""
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=controller(10.77.0.254)
SlurmUser=root
AuthInfo=socket={directory}/run/munge.sock,cred_expire=5
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/run/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=15
MessageTimeout=20
UnkillableStepTimeout=120
TCPTimeout=5
MinJobAge=3600
NodeName=DEFAULT CPUs=64 RealMemory=8000 Gres=gpu:a100:8
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=300 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing_programs() -> list[str]:
    """The programs of Slurm and munge that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def require_slurm() -> None:
    """Skip the test where Slurm is not installed, in one place, so that pytest reports one line."""
    if missing := missing_programs():
        pytest.skip(
            f"no Slurm here ({', '.join(missing)} missing): apt-get install slurm-wlm munge"
        )
    trial = "ip link add v0 type veth peer name v1 && mount -t tmpfs t /run && ip netns add n0"
    if subprocess.run([*namespaces(), "sh", "-c", trial], capture_output=True).returncode:
        pytest.skip("no namespaces for a Slurm here: needs root, or namespaces of users")


def namespaces() -> list[str]:
    """The beginning of a command in new namespaces, as root there."""
    return [*NAMESPACES, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


@dataclass(frozen=True)
class Job:
    """The output of `scontrol show job`."""

    number: int
    state: str
    restarts: int
    reason: str
    nodes: str
    exit_code: str


class Cluster:
    """A Slurm of `nodes` virtual nodes; a context manager, for use from several threads."""

    def __init__(self, nodes: int = 13) -> None:
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.bad_node = self.nodes[-1]
        self.directory = Path(tempfile.mkdtemp(prefix="ora-slurm-"))
        self._supervisor: subprocess.Popen[str] | None = None
        self._first_process = 0
        self._one_command = threading.Lock()
        self._free = self.nodes[:-1]
        self._freed = threading.Condition()

    def __enter__(self) -> Cluster:
        try:
            _write_files(self.directory, self.nodes)
            self._start()
            wait_until(self._is_idle, "all nodes to be idle", timeout=120, describe=self.logs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._supervisor is not None:
            self._supervisor.stdin.close()
            self._supervisor.wait(timeout=60)
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(
        self, *command: object, environment: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command where the cluster's users would, in the checkout's root."""
        spaces = ["--mount", "--pid", "--net", "--uts"] + ["--user"] * (os.geteuid() != 0)
        target = f"--target={self._first_process}"
        inside = ["nsenter", target, *spaces, f"--wd={ROOT}", "--"]
        env = rank_environment() | {
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            "PATH": _path(),
        }
        return subprocess.run(
            [*inside, *map(str, command)],
            cwd=ROOT,
            env=env | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def output_of(self, command: str) -> str:
        """The output of a command, given as a line."""
        done = self.run(*shlex.split(command))
        assert done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def answer_to(self, question: str) -> str:
        """The output of a command that changes nothing, asked again if it fails."""
        for _ in range(4):
            done = self.run(*shlex.split(question))
            if done.returncode == 0:
                return done.stdout
            time.sleep(2)
        return self.output_of(question)

    def sbatch(self, *arguments: object, environment: Mapping[str, str] | None = None) -> int:
        """Submit; returns the job's number."""
        done = self.run("sbatch", "--parsable", *arguments, environment=environment)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return int(done.stdout)

    def jobs(self, number: int) -> list[Job]:
        """The job, or the tasks of an array."""
        jobs = []
        for line in self.answer_to(f"scontrol show job -o {number}").splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            jobs.append(
                Job(
                    number=int(fields["JobId"]),
                    state=fields["JobState"],
                    restarts=int(fields["Restarts"]),
                    reason=fields["Reason"],
                    nodes=fields.get("NodeList", ""),
                    exit_code=fields["ExitCode"],
                )
            )
        return jobs

    def job(self, number: int) -> Job:
        (job,) = self.jobs(number)
        return job

    def nodes_of(self, number: int) -> list[str]:
        """The nodes of a running job, the head node first."""
        return self.answer_to(f"scontrol show hostnames {self.job(number).nodes}").split()

    def wait_for_end(
        self, number: int, timeout: float = 400, describe: Callable[[], str] | None = None
    ) -> list[Job]:
        """Wait until no task of the job is pending, running or completing."""
        wait_until(
            lambda: self.is_over(number),
            f"job {number} to end",
            timeout=timeout,
            describe=describe or (lambda: str(self.jobs(number))),
            every=2.0,
        )
        return self.jobs(number)

    def is_over(self, number: int) -> bool:
        if any(job.state not in OVER for job in self.jobs(number)):
            return False
        return not self.answer_to(f"squeue -h -j {number}").strip()

    @contextmanager
    def reserve(self, count: int, timeout: float = 1200) -> Iterator[tuple[str, ...]]:
        """Wait for `count` good nodes that no other caller is given meanwhile."""
        with self._freed:
            enough = self._freed.wait_for(lambda: len(self._free) >= count, timeout)
            assert enough, f"waited {timeout} s for {count} nodes, free are {self._free}"
            mine = tuple(self._free[:count])
            del self._free[:count]
        try:
            yield mine
        finally:
            with self._freed:
                self._free += mine
                self._freed.notify_all()

    def nothing_but(self, *nodes: str) -> str:
        """The option of sbatch and srun that leaves out all other nodes."""
        return f"--exclude={','.join(node for node in self.nodes if node not in nodes)}"

    def processes(self, *words: str, **environment: str) -> list[psutil.Process]:
        """The Python processes of jobs with these words in their command and these variables."""
        wanted = {"SLURM_CONF": str(self.directory / "slurm.conf"), **environment}
        processes = []
        for process in psutil.process_iter():
            try:
                variables = process.environ()
                command = process.cmdline()
            except (psutil.Error, OSError):
                continue
            python = bool(command) and Path(command[0]).name.startswith("python")
            if python and wanted.items() <= variables.items() and set(words) <= set(command):
                processes.append(process)
        return processes

    def ranks(self, number: int) -> dict[int, psutil.Process]:
        """The processes of a job's training ranks, by rank."""
        processes = self.processes("pretrain", "train", SLURM_JOB_ID=str(number))
        return {int(process.environ()["SLURM_PROCID"]): process for process in processes}

    def kill_node(self, node: str) -> None:
        self._tell(f"kill {node}")

    def lose_nodes(self, nodes: Sequence[str]) -> None:
        """Power off, and Slurm is told at once, as by a site's health check: all together."""
        for node in nodes:
            self.kill_node(node)
        self.output_of(f"scontrol update NodeName={','.join(nodes)} State=DOWN Reason=drill")

    def start_node(self, node: str) -> None:
        """Power on; returns when Slurm uses the node again."""
        self._tell(f"start {node}")
        up = ("idle", "allocated", "mixed", "completing")
        wait_until(
            lambda: self._states(f"-n {node}")[0] in up,
            f"{node} to come back",
            timeout=120,
            describe=self.logs,
        )

    def _start(self) -> None:
        module = [sys.executable, "-m", "tests.slurm.supervisor", str(self.directory)]
        self._supervisor = subprocess.Popen(
            [*namespaces(), *module, *self.nodes],
            cwd=ROOT,
            env=rank_environment() | {"PATH": _path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = self._supervisor.stdout.readline().split()
        assert answer[:1] == ["ready"], f"Slurm did not start: {answer}\n{self.logs()}"
        (first,) = psutil.Process(self._supervisor.pid).children()
        self._first_process = first.pid

    def _tell(self, command: str) -> None:
        with self._one_command:
            self._supervisor.stdin.write(command + "\n")
            self._supervisor.stdin.flush()
            assert self._supervisor.stdout.readline() == "done\n", command

    def _states(self, which: str = "") -> list[str]:
        return self.run(*f"sinfo -h -N -p main -o %T {which}".split()).stdout.split()

    def _is_idle(self) -> bool:
        return self._states() == ["idle"] * len(self.nodes)

    def logs(self) -> str:
        """The daemons' last words."""
        parts = []
        for path in sorted((self.directory / "log").glob("*")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts += [f"--- {path.name}", *lines]
        return "\n".join(parts)


def wait_until(
    condition: Callable[[], bool],
    what: str,
    timeout: float,
    describe: Callable[[], str] = lambda: "",
    every: float = 0.2,
) -> None:
    """Ask `condition` every so many seconds, for `timeout` seconds at most."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}\n{describe()}"
        time.sleep(every)


def _path() -> str:
    return f"{os.environ.get('PATH', '/usr/bin:/bin')}:{SYSTEM_PATH}"


def _write_files(directory: Path, nodes: Sequence[str]) -> None:
    """Write the files of a Slurm of `nodes`; the last of them is taken first."""
    for name in ("run", "log", "state", "spool", "dev"):
        (directory / name).mkdir()
    directory.chmod(0o755)  # munge wants its socket's directory open to everybody
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    for number in range(8):
        (directory / f"dev/nvidia{number}").symlink_to("/dev/null")
    gpus = f"NodeName={','.join(nodes)} Name=gpu Type=a100 File={directory}/dev/nvidia[0-7]\n"
    (directory / "gres.conf").write_text(gpus)
    addresses = {node: f"10.77.0.{number}" for number, node in enumerate(nodes, start=1)}
    hosts = {"localhost": "127.0.0.1", "controller": "10.77.0.254", **addresses}
    lines = [f"{address} {host}\n" for host, address in hosts.items()]
    (directory / "hosts").write_text("".join(lines))
    described = [
        f"NodeName={node} NodeAddr={address} Weight={1 if node == nodes[-1] else 10}"
        for node, address in addresses.items()
    ]
    text = CONFIGURATION.format(directory=directory, nodes="\n".join(described))
    (directory / "slurm.conf").write_text(text)
