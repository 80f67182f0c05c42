"""A preprocessing tool of Megatron-LM, unchanged, run several times in one process.

On a file of one document for each worker, then on the corpus; what is printed is the difference, so that
imports (eight seconds and more of CPU, and no two times the same) and the loading of the tokenizer do not
count.
"""

from __future__ import annotations

import runpy
import sys

from benchmarks.data.clocks import report_difference


def main() -> None:
    """python -m benchmarks.data.megatron_run TOOL SMALL LARGE ARGUMENT... (without --input)."""
    tool, small, large, *arguments = sys.argv[1:]

    def once(path: str) -> int:
        sys.argv = [tool, "--input", path, *arguments]
        runpy.run_path(tool, run_name="__main__")
        return 0

    report_difference(lambda: once(small), lambda: once(large))


if __name__ == "__main__":
    main()
