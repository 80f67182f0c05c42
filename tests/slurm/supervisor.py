"""Starts and ends the daemons of a private Slurm, as the first process of its namespaces.

Everything that it started ends with it. Commands come from `cluster.Cluster` on stdin, one a line:
`start NODE` and `kill NODE` (the power goes off); each is answered by one line. It ends when stdin
does, because the tests ended or were killed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

NODE_MARK = "ORA_TEST_NODE"
"""In the environment of a node's slurmd, and of the slurmstepd processes that it starts."""


class Supervisor:
    """The daemons of one Slurm; every node has a network of its own, and the last is bad."""

    def __init__(self, directory: Path, nodes: list[str]) -> None:
        self.directory = directory
        self.nodes = nodes
        self.environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf")}

    def start(self) -> None:
        _run("hostname controller")
        _run("mount -t tmpfs tmpfs /dev/shm")
        _run(f"mount --bind {self.directory}/hosts /etc/hosts")
        self._make_networks()
        run, log = self.directory / "run", self.directory / "log"
        files = f"--key-file={self.directory}/munge.key --socket={run}/munge.sock"
        files += f" --pid-file={run}/munged.pid --log-file={log}/munged.log"
        files += f" --seed-file={run}/munged.seed"
        self._spawn("munged", "munged", "--foreground", "--force", *files.split())
        deadline = time.monotonic() + 60
        while not (run / "munge.sock").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._spawn("slurmctld", "slurmctld", "-D", "-i")
        for node in self.nodes:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        _run(f"ip link set to-{node} up")
        command = f"hostname {node} && exec slurmd -D -N {node}"
        if node == self.nodes[-1]:
            command = f"mount -t tmpfs -o size=4m tmpfs /dev/shm && {command}"
        apart = f"nsenter --net=/run/netns/{node} unshare --uts --mount sh -c".split()
        self._spawn(f"slurmd-{node}", *apart, command, environment={NODE_MARK: node})

    def kill_node(self, node: str) -> None:
        """As if its power went off: no more packets, no last words."""
        _run(f"ip link set to-{node} down")
        doomed = []
        for process in psutil.process_iter():
            environment = environment_of(process)
            if node in (environment.get(NODE_MARK), environment.get("SLURMD_NODENAME")):
                process.suspend()
                doomed.append(process)
        _kill(doomed)

    def _spawn(self, log: str, *command: str, environment: dict[str, str] | None = None) -> None:
        with (self.directory / f"log/{log}.out").open("ab") as output:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment | (environment or {}),
                start_new_session=True,
            )

    def _make_networks(self) -> None:
        """A bridge, and on it a network namespace per node."""
        _run("mount -t tmpfs tmpfs /run")
        _run("ip link set lo up")
        _run("ip link add bridge type bridge")
        _run("ip addr add 10.77.0.254/24 dev bridge")
        _run("ip link set bridge up")
        for number, node in enumerate(self.nodes, start=1):
            _run(f"ip netns add {node}")
            _run(f"ip link add to-{node} type veth peer name eth0 netns {node}")
            _run(f"ip link set to-{node} master bridge up")
            _run(f"ip -n {node} addr add 10.77.0.{number}/24 dev eth0")
            _run(f"ip -n {node} link set eth0 up")
            _run(f"ip -n {node} link set lo up")


def serve(supervisor: Supervisor) -> None:
    """Do what stdin says until it ends, and collect the orphans that the first process inherits."""
    actions = {"start": supervisor.start_node, "kill": supervisor.kill_node}
    while True:
        ready, _, _ = select.select([0], [], [], 0.5)
        _reap()
        if not ready:
            continue
        words = os.read(0, 4096).decode().split()  # one command: the next waits for its answer
        if not words:
            return
        actions[words[0]](words[1])
        print("done", flush=True)


def _reap() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Its variables; none if it is gone.

    Not psutil's: slurmstepd writes its title over the first of them, and psutil stops at the zeros
    there.
    """
    try:
        block = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = [entry.partition("=") for entry in block.decode(errors="replace").split("\0")]
    return {name: value for name, equals, value in entries if equals}


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(process.is_running() for process in processes):
        _reap()
        time.sleep(0.05)


def main() -> None:
    directory, *nodes = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C in the tests' terminal: they close stdin
    supervisor = Supervisor(Path(directory), nodes)
    try:
        supervisor.start()
        print("ready", flush=True)
        serve(supervisor)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
