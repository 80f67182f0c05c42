"""Our tokenize with its own options left as they are, from files to the finished manifest.

What is printed is the time of the corpus less that of the small files, tokenised first in the same process.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.data.clocks import report_difference
from data_pipeline.io.progress import ProgressLine
from data_pipeline.sources.discovery import Inputs, find_inputs
from data_pipeline.tokenizing.plan import TokenizeOptions
from data_pipeline.tokenizing.run import Run


def main() -> None:
    """pipeline_run.py WORKERS MODEL OUT SMALL... -- FILE..."""
    workers, model, out = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    between = sys.argv.index("--")

    def once(paths: list[str], directory: Path) -> int:
        shutil.rmtree(directory, ignore_errors=True)
        files = find_inputs([Path(path) for path in paths])
        with ProgressLine(sum(file.size for file in files)) as line:
            run = Run(Inputs(files), model, directory, TokenizeOptions("x"), workers, line.update)
            run.make()
            manifest = run.finish()
        return sum(shard.tokens for shard in manifest.shards)

    report_difference(
        lambda: once(sys.argv[4:between], out / "small"), lambda: once(sys.argv[between + 1 :], out / "large")
    )


if __name__ == "__main__":
    main()
