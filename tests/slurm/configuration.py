"""The files of a private Slurm of virtual nodes: slurm.conf, gres.conf, a munge key, host names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

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
TCPTimeout=5
MinJobAge=3600
NodeName=DEFAULT CPUs=64 RealMemory=8000 Gres=gpu:a100:8
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=300 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def write_files(directory: Path, nodes: Sequence[str]) -> None:
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
