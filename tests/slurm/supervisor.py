"""Starts and ends the daemons of a private Slurm; everything it started ends with it.

Run by `cluster.Cluster`, as the first process of new namespaces where the system allows that.
Commands come on stdin, one a line: `start NODE` and `kill NODE` (the power goes off); each is
answered by one line. When stdin ends, because the tests ended or were killed, it ends all processes
of this Slurm and removes its directory.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

NODE_MARK = "ORA_TEST_NODE"
"""In the environment of a node's slurmd, and of the slurmstepd processes that it starts."""


class Supervisor:
    """The daemons of one Slurm; with a bad node, every node has a network of its own."""

    def __init__(self, directory: Path, nodes: list[str], bad_node: str) -> None:
        self.directory = directory
        self.nodes = nodes
        self.bad_node = bad_node
        self.environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf")}
        if bad_node:
            _run("mount -t tmpfs tmpfs /dev/shm")
            _run(f"mount --bind {directory}/hosts /etc/hosts")
            self._make_networks()

    def start(self) -> None:
        run, log = self.directory / "run", self.directory / "log"
        files = f"--key-file={self.directory}/munge.key --socket={run}/munge.sock"
        files += f" --pid-file={run}/munged.pid --log-file={log}/munged.log"
        files += f" --seed-file={run}/munged.seed"
        self._spawn("munged", "munged", "--foreground", "--force", *files.split())
        _wait_for(self.directory / "run/munge.sock")
        self._spawn("slurmctld", "slurmctld", "-D", "-i")
        for node in self.nodes:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        command = f"exec slurmd -D -N {node}"
        if node == self.bad_node:
            command = f"mount -t tmpfs -o size=4m tmpfs /dev/shm && {command}"
        start = ["sh", "-c", command]
        if self.bad_node:
            _run(f"ip link set to-{node} up")
            own = f"nsenter --net=/run/netns/{node} unshare --uts --mount".split()
            start = [*own, "sh", "-c", f"hostname {node} && {command}"]
        self._spawn(f"slurmd-{node}", *start, environment={NODE_MARK: node})

    def kill_node(self, node: str) -> None:
        """As if its power went off: no more packets, no last words."""
        if self.bad_node:
            _run(f"ip link set to-{node} down")
        doomed = []
        for process in self._family():
            environment = environment_of(process)
            if node in (environment.get(NODE_MARK), environment.get("SLURMD_NODENAME")):
                process.suspend()
                doomed.append(process)
        _kill(doomed)

    def stop(self) -> None:
        """End every process of this Slurm, jobs included."""
        deadline = time.monotonic() + 30
        while (family := self._family()) and time.monotonic() < deadline:
            _kill(family)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _family(self) -> list[psutil.Process]:
        mark = self.environment["SLURM_CONF"]
        found = [p for p in psutil.process_iter() if environment_of(p).get("SLURM_CONF") == mark]
        me = os.getpid()
        return [p for p in found if p.pid != me]

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
        """A bridge, and on it a network namespace per node; all goes with the last process."""
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
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.5)
        _reap()
        if not ready:
            continue
        chunk = os.read(0, 4096)
        if not chunk:
            return
        pending += chunk
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            words = line.decode().split()
            action = {
                "start": supervisor.start_node,
                "kill": supervisor.kill_node,
            }[words[0]]
            action(words[1])
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
    entries = [entry.partition(b"=") for entry in block.split(b"\0") if b"=" in entry]
    return {
        name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in entries
    }


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(_alive(process) for process in processes):
        _reap()
        time.sleep(0.05)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path} did not appear within 60 s")
        time.sleep(0.05)


def main() -> None:
    directory, nodes, bad_node = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C in the tests' terminal: they close stdin
    supervisor = Supervisor(Path(directory), nodes.split(","), bad_node)
    try:
        supervisor.start()
        print("ready", flush=True)
        serve(supervisor)
    finally:
        supervisor.stop()


if __name__ == "__main__":
    main()
