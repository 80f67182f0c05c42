"""A server that has imported torch, megatron-core and DeepSpeed once, and forks the ranks of tests.

    python -m tests.warm_ranks SOCKET        (tests/ranks.py starts it, once a test session)

A rank's own imports take three to five seconds of a core; a fork of a process that has them,
milliseconds. For every request the server forks a launcher, and the launcher forks the ranks, waits
for them and answers with their exit code. Ranks see what the product's launcher would give them:
torchrun's variables, a store in their launcher, a process group of their own; if the launcher dies,
the kernel kills them.

Forking is safe because nothing is running yet: the server has one thread (it refuses to fork
otherwise), no process group and no store; the launcher makes the store after it has forked. For the
CPU only: a CUDA context does not survive a fork.

The server ends when its stdin does, that is with the last process of the session that uses it. A
launcher whose requester goes away (a timeout, an interrupted session) kills its ranks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

GRACE_SECONDS = 15.0
"""How long the other ranks get to end by themselves after one failed."""


def serve(address: str) -> None:
    """Import, say so, fork a launcher for every connection until stdin ends; remove `address`."""
    _import_everything()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the launchers
    gc.freeze()  # all ranks share what is here now: the garbage collector need not touch it
    with socket.socket(socket.AF_UNIX) as requests:
        requests.bind(address)
        requests.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([requests, sys.stdin], [], [])
            if sys.stdin in ready:
                shutil.rmtree(Path(address).parent)
                return
            job, _ = requests.accept()
            if os.fork() == 0:
                _die_with(os.getppid())
                requests.close()
                _launch(job)
            job.close()


def _import_everything() -> None:
    from megatron_patches.engine.compat import prepare_imports

    prepare_imports()
    from pretrain.ranks.groups import import_deepspeed

    import_deepspeed()
    for module in (
        "pretrain.__main__",
        "pretrain.training.loop",
        "laboratory.evaluation.heads.trained_model",
        "laboratory.compare.report",
        "deepspeed.module_inject",
        # what compiling a layer imports, two seconds a rank
        "torch._inductor.compile_fx",
        "torch._inductor.codegen.cpp",
    ):
        importlib.import_module(module)


def _launch(job: socket.socket) -> NoReturn:
    """Fork the ranks of one request, wait for them, answer with their exit code."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request = json.loads(job.makefile().readline())
        _redirect(request["stdout"], request["stderr"])
        os.environ.clear()
        os.environ.update(request["environment"])
        ranks, ports = _fork_ranks(request)
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for port in ports:
            # A command that has been refused by now has asked for none.
            with suppress(BrokenPipeError):
                os.write(port, f"{store.port}\n".encode())
        code = _wait(ranks, job)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        job.sendall(f"{code}\n".encode())
        os._exit(code)


def _fork_ranks(request: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Process ids, and for each rank the pipe on which it waits for the store's port."""
    ranks, ports = [], []
    for rank in range(request["ranks"]):
        reading, writing = os.pipe()
        launcher = os.getpid()
        process = os.fork()
        if process == 0:
            os.setpgrp()
            _die_with(launcher)
            _be_rank(rank, request, reading)
        os.close(reading)
        ranks.append(process)
        ports.append(writing)
    return ranks, ports


def _be_rank(rank: int, request: dict[str, Any], port: int) -> NoReturn:
    code = 1
    try:
        if request["launched"]:
            os.environ |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": os.read(port, 16).decode().strip(),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "WORLD_SIZE": str(request["ranks"]),
                "LOCAL_WORLD_SIZE": str(request["ranks"]),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            }
        {"function": _call, "command": _run_command}[request["kind"]](request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not past this frame: the server's frames are below it


def _call(arguments: list[str]) -> None:
    """`module:function(payload)`, in a world that all the runs of the function share."""
    target, payload, result = arguments
    module, function = target.split(":")
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    dist.barrier()  # a rank that needs no other leaves while the others still connect to it
    answer = getattr(importlib.import_module(module), function)(json.loads(payload))
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(answer))


def _run_command(arguments: list[str]) -> None:
    from pretrain.__main__ import main

    sys.argv = ["pretrain", *arguments]
    main()


def _wait(ranks: list[int], job: socket.socket) -> int:
    """0 if every rank did, else the code of the first that failed (128 + number for a signal)."""
    running = set(ranks)
    code = 0
    deadline = float("inf")
    while running:
        gone, status = os.waitpid(-1, os.WNOHANG)
        if gone:
            running.remove(gone)
            ended = os.waitstatus_to_exitcode(status)
            if ended and not code:
                code = ended if ended > 0 else 128 - ended
                deadline = time.monotonic() + GRACE_SECONDS
        elif select.select([job], [], [], 0.02)[0] or time.monotonic() > deadline:
            # Nobody waits, or enough.
            for rank in running:
                os.kill(rank, signal.SIGKILL)
            deadline = float("inf")
            time.sleep(0.02)
    return code


def _redirect(output: str, errors: str) -> None:
    """Stdout and stderr of this process and its ranks into files; nothing to read."""
    for path, flags, number in (
        (os.devnull, os.O_RDONLY, 0),
        (output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 1),
        (errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 2),
    ):
        file = os.open(path, flags, 0o600)
        os.dup2(file, number)
        os.close(file)


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies (Linux), and see that it has not already."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    serve(sys.argv[1])
