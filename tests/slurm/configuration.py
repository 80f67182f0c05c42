"""The files of a private Slurm of virtual nodes: slurm.conf, gres.conf, a munge key, host names."""

from __future__ import annotations

import os
import pwd
import random
import socket
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_ports

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


@dataclass(frozen=True)
class ClusterFiles:
    """The files of a Slurm of `nodes`; with `isolated` every node has its own address."""

    directory: Path
    nodes: tuple[str, ...]
    bad_node: str
    isolated: bool

    def write(self) -> None:
        for name in ("run", "log", "state", "spool", "dev"):
            (self.directory / name).mkdir()
        self.directory.chmod(0o755)  # munge wants its socket's directory open to everybody
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        for number in range(8):
            (self.directory / f"dev/nvidia{number}").symlink_to("/dev/null")
        devices = f"File={self.directory}/dev/nvidia[0-7]"
        gpus = f"NodeName={','.join(self.nodes)} Name=gpu Type=a100 {devices}\n"
        (self.directory / "gres.conf").write_text(gpus)
        (self.directory / "hosts").write_text(self._hosts())
        (self.directory / "slurm.conf").write_text(self._configuration())

    def _hosts(self) -> str:
        lines = ["127.0.0.1 localhost"]
        if self.isolated:
            lines += [f"10.77.0.{number} {node}" for number, node in enumerate(self.nodes, start=1)]
            lines += [f"10.77.0.254 {socket.gethostname()}"]
            return "\n".join(lines) + "\n"
        return f"127.0.0.1 localhost {socket.gethostname()}\n"

    def _configuration(self) -> str:
        ports = free_ports(len(self.nodes) + 1)
        lines = []
        for number, (node, port) in enumerate(zip(self.nodes, ports[1:], strict=True), start=1):
            where = f"NodeHostname={node} NodeAddr=10.77.0.{number}"
            if not self.isolated:
                where = "NodeHostname=localhost NodeAddr=127.0.0.1"
            weight = 1 if node == self.bad_node else 10  # the bad node is taken first
            lines.append(
                f"NodeName={node} {where} Port={port} CPUs=64 RealMemory=8000 Gres=gpu:a100:8 "
                f"Weight={weight}"
            )
        return CONFIGURATION.format(
            directory=self.directory,
            controller=socket.gethostname() if self.isolated else "localhost",
            controller_address="10.77.0.254" if self.isolated else "127.0.0.1",
            port=ports[0],
            user=pwd.getpwuid(os.geteuid()).pw_name,
            # The ranks' port follows from it: not twice the same.
            first_job=random.randrange(1000, 60000),
            nodes="\n".join(lines),
        )
