"""Cost of a tool beyond its start, in a process of its own: a large input less a small one.

    python benchmarks/data/warm.py SMALL LARGE TOOL ARGUMENT...

TOOL is a file or a module. `{input}` in an argument is SMALL, SMALL again, then LARGE; `{call}` is
0, 1, 2. The first call is not measured: it imports what all use. The second is taken off the third,
so that neither imports (eight seconds and more of CPU, no two times the same) nor the loading of a
tokenizer count. Printed: seconds by the clock, CPU seconds of this process and its workers, and the
most MB that one of them held.

Nothing but the standard library is imported here: Megatron-LM's tools may have an interpreter of
their own.
"""

from __future__ import annotations

import resource
import runpy
import sys
import time


def call(tool: str, arguments: list[str]) -> None:
    """Run the tool as a program in this process; a failure ends it.

    Args:
        tool: a file, or a module.
        arguments: what follows it on the command line.
    """
    sys.argv = [tool, *arguments]
    try:
        (runpy.run_path if tool.endswith(".py") else runpy.run_module)(tool, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise


if __name__ == "__main__":
    small, large, program, *words = sys.argv[1:]
    wall, cpu = [], []
    for number, given in enumerate((small, small, large)):
        call(
            program,
            [word.replace("{input}", given).replace("{call}", str(number)) for word in words],
        )
        own, workers = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        wall.append(time.monotonic())
        cpu.append(sum(used.ru_utime + used.ru_stime for used in (own, workers)))
    seconds = [c - b - (b - a) for a, b, c in (wall, cpu)]
    print("\nmeasured:", *seconds, max(own.ru_maxrss, workers.ru_maxrss) / 1e3, flush=True)
