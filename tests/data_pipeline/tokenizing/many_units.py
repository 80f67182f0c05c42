"""For test_many_units: `python -m tests.data_pipeline.tokenizing.many_units SHARDS CACHE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    """Read samples of a shard directory; print how many descriptors that took."""
    from data_pipeline.shards.blend import Member, make_blend
    from data_pipeline.shards.manifest import check_shards, read_manifest

    before = len(os.listdir("/proc/self/fd"))
    manifest = read_manifest(Path(sys.argv[1]))
    check_shards(manifest)
    sources = manifest.sources("train")
    for members in ([Member(manifest)], [Member(manifest, 1, dict.fromkeys(sources, 1))]):
        blend = make_blend(members)
        samples = blend.training_samples(16, 1, Path(sys.argv[2]))
        samples.prepare(0)
        samples.blocks(np.arange(4096))
        held_out = blend.validation_samples(16, 4)
        for one in held_out.values():
            one.blocks(np.arange(len(one)))
        print("descriptors", len(os.listdir("/proc/self/fd")) - before)


if __name__ == "__main__":
    main()
