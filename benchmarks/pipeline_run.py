"""Our tokenize with its own options left as they are, from files to the finished manifest."""

from __future__ import annotations

import sys
from pathlib import Path

from data_pipeline.plan import TokenizeOptions
from data_pipeline.progress import ProgressLine
from data_pipeline.sources import find_inputs
from data_pipeline.tokenize import tokenize


def main() -> None:
    """pipeline_run.py WORKERS MODEL OUT FILE..."""
    workers, model, out, paths = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    files = find_inputs([Path(path) for path in paths])
    with ProgressLine(sum(file.size for file in files)) as line:
        manifest, _ = tokenize(files, model, out, TokenizeOptions("x"), workers, line.update)
    print("measured: tokens", sum(shard.tokens for shard in manifest.shards))


if __name__ == "__main__":
    main()
