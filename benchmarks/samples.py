"""The cost of the order of samples, and the speed of reading them beside that of training.

    python -m benchmarks.samples [--tokens 1e9] [--sequence-length 512] [--directory DIR]

Random shards (documents of 862 tokens on average, as in SlimPajama; 2 GB for the default of a
billion tokens) are written to a temporary directory. Measured in this process, on one core, each
for the whole directory and for a blend of its sources: making the order of an epoch, loading it
from the cache, opening included, and reading in training order. The shards are in the page cache,
as those of a running job are if memory allows.

The yardstick is the most that one training process could consume: an A100 at 100 % of its bf16 peak
on the smallest shipped model.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.rounds import options_parser, report, take_turns
from data_pipeline.shards.blend import Blend, BlendedSamples, Member, make_blend
from megatron_patches.recipe.counting import model_flops_per_token
from pretrain.config.load import load_config
from pretrain.data.batches import SAMPLES_AT_ONCE
from pretrain.ranks.devices import peak_flops
from tests.data_pipeline.shards.synthetic import random_shards

SAMPLES_READ = 20_032


def prepare(blend: Blend, length: int, cache: Path, *, anew: bool) -> BlendedSamples:
    """Return samples with the order of the first epoch prepared.

    Args:
        blend: Blend of the shards.
        length: Length of a sample, in tokens.
        cache: Directory of the order.
        anew: Make the order instead of loading it.
    """
    if anew:
        shutil.rmtree(cache, ignore_errors=True)
    samples = blend.training_samples(length, 1, cache)
    samples.prepare(0)
    return samples


def read(samples: BlendedSamples) -> None:
    """Read the first samples in training order, as many at once as the training loop does."""
    for batch in np.arange(SAMPLES_READ).reshape(-1, SAMPLES_AT_ONCE):
        samples.blocks(batch)


def main() -> None:
    """Print the table, and the speed of reading."""
    parser = options_parser(__doc__, rounds=3)
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--directory", type=Path, help="where the temporary directory goes")
    options = parser.parse_args()
    length = options.sequence_length
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        manifest = random_shards(Path(temporary) / "shards", int(options.tokens), shards=7)
        shares = {source: 1.0 + number for number, source in enumerate(manifest.sources("train"))}
        blends = {
            "whole": make_blend([Member(manifest)]),
            "blend": make_blend([Member(manifest, 1, shares)]),
        }
        actions: dict[str, Callable[[], object]] = {}
        for name, blend in blends.items():
            cache = Path(temporary) / name
            samples = prepare(blend, length, cache, anew=True)
            actions[f"order of {name}: from the cache"] = partial(
                prepare, blend, length, cache, anew=False
            )
            actions[f"order of {name}: made and kept"] = partial(
                prepare, blend, length, cache.with_name(f"{name}-made"), anew=True
            )
            actions[f"reading: {name}"] = partial(read, samples)
        seconds = take_turns(actions, options.rounds, time.process_time)
        report(seconds, options.json)
    consumed = (peak_flops("NVIDIA A100-SXM4-80GB", "bf16") or 0.0) / model_flops_per_token(
        load_config("small").shape
    )
    for name in blends:
        rate = SAMPLES_READ * length / statistics.median(seconds[f"reading: {name}"])
        print(f"{name}: {rate / 1e6:.1f} M tokens per CPU second, {rate / consumed:.0f} times")
    print(f"what an A100 consumes at 100 % of its peak on `small`, {consumed:,.0f} tokens/s")


if __name__ == "__main__":
    main()
