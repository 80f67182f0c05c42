"""Ports that nothing takes before the process for which they are chosen."""

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Find ports from 30000 to 32767, which neither ranks nor outgoing connections use.

    A port that the kernel chose may be another connection's again before the process that was
    given it starts.
    """
    free = []
    for port in random.sample(range(30000, 32768), 2768):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
        if len(free) == count:
            break
    return free
