"""A private Slurm on this machine: own munge, slurmctld, and a slurmd per virtual node with 8 fake GPUs.

Where the system allows it (root), it lives in process, mount and network namespaces of its own: every node
has its own host name and address, and nothing can be left behind. Elsewhere all nodes share the machine's
loopback address. ORA_TEST_SLURM=loopback and ORA_TEST_SLURM=plain choose less: one network for all, and no
namespaces at all. The last node is bad where nodes can differ: its /dev/shm has 4 MB.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.ranks import ROOT, rank_environment

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
NAMESPACES = ("unshare", "--pid", "--fork", "--mount", "--mount-proc", "--uts", "--net", "--kill-child")
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={controller}({controller_address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
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
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MpiDefault=none
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
KillWait=30
MessageTimeout=20
TCPTimeout=5
MinJobAge=3600
FirstJobId={first_job}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=300 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing_programs() -> list[str]:
    """The programs of Slurm and munge that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def require_slurm() -> None:
    """Skip the test where Slurm is not installed; one place, so that pytest reports one line for all."""
    if missing := missing_programs():
        pytest.skip(f"no Slurm here ({', '.join(missing)} missing): apt-get install slurm-wlm munge")


@dataclass(frozen=True)
class Job:
    """What `scontrol show job` says of a job."""

    number: int
    state: str
    restarts: int
    reason: str
    nodes: str
    exit_code: str


class Cluster:
    """One Slurm of `nodes` virtual nodes; a context manager."""

    def __init__(self, nodes: int = 6) -> None:
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.bad_node = self.nodes[-1]
        self.directory = Path(tempfile.mkdtemp(prefix="ora-slurm-"))
        wanted = os.environ.get("ORA_TEST_SLURM", "networks")
        self.isolated = wanted != "plain" and os.geteuid() == 0 and _can(*NAMESPACES, "true")
        self.networks = self.isolated and wanted != "loopback" and _can_have_networks()
        self._supervisor: subprocess.Popen[str] | None = None
        self._first_process = 0

    def __enter__(self) -> Cluster:
        try:
            self._write_files()
            self._start()
            wait_until(self._is_idle, "all nodes to be idle", timeout=120)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._supervisor is not None:
            self._supervisor.stdin.close()
            self._supervisor.wait(timeout=60)
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- what a user types --------------------------------------------------------------------------------

    def run(
        self, *command: object, environment: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command where the cluster's users would, in the checkout's root."""
        inside: list[str] = []
        if self.isolated:
            inside = ["nsenter", f"--target={self._first_process}", "--mount", "--pid", "--net", "--uts"]
            inside += [f"--wd={ROOT}", "--"]
        env = rank_environment() | {"SLURM_CONF": str(self.directory / "slurm.conf"), "PATH": _path()}
        return subprocess.run(
            [*inside, *map(str, command)],
            cwd=ROOT,
            env=env | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def output_of(self, *command: object) -> str:
        done = self.run(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def sbatch(self, *arguments: object, environment: Mapping[str, str] | None = None) -> int:
        """Submit; returns the job's number."""
        done = self.run("sbatch", "--parsable", *arguments, environment=environment)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return int(done.stdout)

    def jobs(self, number: int) -> list[Job]:
        """The job, or the tasks of an array."""
        found = []
        for line in self.output_of("scontrol", "show", "job", "-o", number).splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            found.append(
                Job(
                    number=int(fields["JobId"]),
                    state=fields["JobState"],
                    restarts=int(fields["Restarts"]),
                    reason=fields["Reason"],
                    nodes=fields.get("NodeList", ""),
                    exit_code=fields["ExitCode"],
                )
            )
        return found

    def job(self, number: int) -> Job:
        (job,) = self.jobs(number)
        return job

    def nodes_of(self, number: int) -> list[str]:
        """The nodes of a running job, the head node first."""
        return self.output_of("scontrol", "show", "hostnames", self.job(number).nodes).split()

    def wait_for_end(
        self, number: int, timeout: float = 400, describe: Callable[[], str] | None = None
    ) -> list[Job]:
        """Until no task of the job is pending, running or completing."""
        over = {
            "COMPLETED",
            "FAILED",
            "CANCELLED",
            "TIMEOUT",
            "NODE_FAIL",
            "PREEMPTED",
            "BOOT_FAIL",
            "DEADLINE",
        }
        wait_until(
            lambda: all(job.state in over for job in self.jobs(number)) and not self._in_queue(number),
            f"job {number} to end",
            timeout,
            describe or (lambda: str(self.jobs(number))),
        )
        return self.jobs(number)

    def _in_queue(self, number: int) -> bool:
        return bool(self.run("squeue", "-h", "-j", number).stdout.strip())

    # --- what happens to a cluster ------------------------------------------------------------------------

    def processes(self, *words: str, **environment: str) -> list[psutil.Process]:
        """The Python processes of jobs with these words in their command and these variables."""
        wanted = {"SLURM_CONF": str(self.directory / "slurm.conf"), **environment}
        found = []
        for process in psutil.process_iter():
            try:
                variables, command = process.environ(), process.cmdline()
            except (psutil.Error, OSError):
                continue
            python = bool(command) and Path(command[0]).name.startswith("python")
            if python and wanted.items() <= variables.items() and set(words) <= set(command):
                found.append(process)
        return found

    def ranks(self, number: int) -> dict[int, psutil.Process]:
        """The processes of a job's training ranks, by rank."""
        found = self.processes("pretrain", "train", SLURM_JOB_ID=str(number))
        return {int(process.environ()["SLURM_PROCID"]): process for process in found}

    def kill_node(self, node: str) -> None:
        self._tell(f"kill {node}")

    def start_node(self, node: str) -> None:
        """Power on; returns when Slurm uses the node again."""
        self._tell(f"start {node}")
        up = ("idle", "allocated", "mixed", "completing")
        wait_until(lambda: self._state_of(node) in up, f"{node} to come back", 120, self.logs)

    def _state_of(self, node: str) -> str:
        return self.run("sinfo", "-h", "-N", "-p", "main", "-n", node, "-o", "%T").stdout.strip()

    # --- starting -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        flags = [str(int(self.isolated)), str(int(self.networks)), self.bad_node if self.isolated else ""]
        arguments = [str(self.directory), ",".join(self.nodes), *flags]
        namespaces = (
            [word for word in NAMESPACES if word != "--net" or self.networks] if self.isolated else []
        )
        self._supervisor = subprocess.Popen(
            [*namespaces, sys.executable, "-m", "tests.slurm.supervisor", *arguments],
            cwd=ROOT,
            env=rank_environment() | {"PATH": _path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = self._supervisor.stdout.readline().split()
        assert answer[:1] == ["ready"], f"Slurm did not start: {answer}\n{self.logs()}"
        children = psutil.Process(self._supervisor.pid).children()
        self._first_process = children[0].pid if self.isolated else self._supervisor.pid

    def _tell(self, command: str) -> None:
        self._supervisor.stdin.write(command + "\n")
        self._supervisor.stdin.flush()
        assert self._supervisor.stdout.readline() == "done\n", command

    def _states(self) -> list[str]:
        return self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T").stdout.split()

    def _is_idle(self) -> bool:
        return self._states() == ["idle"] * len(self.nodes)

    def logs(self) -> str:
        """The daemons' last words."""
        parts = []
        for path in sorted((self.directory / "log").glob("*")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts += [f"--- {path.name}", *lines]
        return "\n".join(parts)

    def _write_files(self) -> None:
        for name in ("run", "log", "state", "spool", "dev"):
            (self.directory / name).mkdir()
        self.directory.chmod(0o755)  # munge wants its socket's directory open to everybody
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        for number in range(8):
            (self.directory / f"dev/nvidia{number}").symlink_to("/dev/null")
        gpus = f"NodeName={','.join(self.nodes)} Name=gpu Type=a100 File={self.directory}/dev/nvidia[0-7]\n"
        (self.directory / "gres.conf").write_text(gpus)
        (self.directory / "hosts").write_text(self._hosts())
        (self.directory / "slurm.conf").write_text(self._configuration())

    def _hosts(self) -> str:
        lines = ["127.0.0.1 localhost"]
        if self.networks:
            lines += [f"10.77.0.{number} {node}" for number, node in enumerate(self.nodes, start=1)]
            lines += [f"10.77.0.254 {socket.gethostname()}"]
            return "\n".join(lines) + "\n"
        return f"127.0.0.1 localhost {socket.gethostname()}\n"

    def _configuration(self) -> str:
        ports = _free_ports(len(self.nodes) + 1)
        lines = []
        for number, (node, port) in enumerate(zip(self.nodes, ports[1:], strict=True), start=1):
            where = f"NodeHostname={node} NodeAddr=10.77.0.{number}"
            if not self.networks:
                where = "NodeHostname=localhost NodeAddr=127.0.0.1"
            weight = 1 if node == self.bad_node else 10  # the bad node is taken first
            lines.append(
                f"NodeName={node} {where} Port={port} CPUs=64 RealMemory=8000 Gres=gpu:a100:8 Weight={weight}"
            )
        return CONFIGURATION.format(
            directory=self.directory,
            controller=socket.gethostname() if self.networks else "localhost",
            controller_address="10.77.0.254" if self.networks else "127.0.0.1",
            port=ports[0],
            user=pwd.getpwuid(os.geteuid()).pw_name,
            first_job=random.randrange(1000, 60000),  # the ranks' port follows from it: not twice the same
            nodes="\n".join(lines),
        )


def wait_until(
    condition: Callable[[], bool],
    what: str,
    timeout: float,
    describe: Callable[[], str] = lambda: "",
) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}\n{describe()}"
        time.sleep(0.2)


def _path() -> str:
    return f"{os.environ.get('PATH', '/usr/bin:/bin')}:{SYSTEM_PATH}"


def _can(*command: str) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _can_have_networks() -> bool:
    attempt = (
        "ip link add b0 type bridge && ip link add v0 type veth peer name v1 && mount -t tmpfs t /run "
        "&& ip netns add n0"
    )
    return _can(*NAMESPACES, "sh", "-c", attempt)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
