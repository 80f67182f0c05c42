"""Our tokenize, timed from the first report of a worker to the finished manifest.

Prints the seconds, the tokens, and how long it took to the first report.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from data_pipeline.plan import TokenizeOptions
from data_pipeline.pool import Progress
from data_pipeline.progress import ProgressLine
from data_pipeline.sources import find_inputs
from data_pipeline.tokenize import tokenize


def main() -> None:
    """pipeline_run.py WORKERS MODEL OUT FILE..."""
    workers, model, out, paths = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    start = time.monotonic()
    reports: list[float] = []
    files = find_inputs([Path(path) for path in paths])
    options = TokenizeOptions("x")
    with ProgressLine(sum(file.size for file in files)) as line:

        def report(progress: Progress) -> None:
            reports.append(time.monotonic())
            line.update(progress)

        manifest, _ = tokenize(files, model, out, options, workers, report)
    end, tokens = time.monotonic(), sum(shard.tokens for shard in manifest.shards)
    print("seconds", end - reports[0], "tokens", tokens, "startup", reports[0] - start)


if __name__ == "__main__":
    main()
