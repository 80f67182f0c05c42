"""Speed of exported models, prefill and decoding: a frozen one beside an ordinary one.

    python -m benchmarks.inference [--config small] [--variants vanilla orthogonal]

Untrained models of a shipped configuration are exported first: speed does not depend on the
weights' values. Both go through transformers' `generate` parts: one forward pass over the prompt
(prefill), then one token at a time with the cache of keys and values (decode). Frozen rows are
stored like any others, so the two are the same computation: the ratio should be 1, and the last
row, the first model again, shows how far chance takes it.

Every round measures all models, one after the other, in an order that turns; ratios are of one
round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.step.contenders import in_turn
from pretrain.config.load import load_config
from pretrain.study.models import require_transformers


@dataclass
class Measured:
    """A model, and tokens per second of every round."""

    name: str
    model: Any
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def export_untrained(config_name: str, variant: str, out: Path) -> None:
    """Write weights as they are before the first step, and config.json.

    Args:
        config_name: a shipped configuration.
        variant: of its attention.
        out: the directory to make.
    """
    from pretrain.export.architectures import architecture_of
    from pretrain.export.weight_files import write_weights
    from pretrain.model.build import build_model
    from pretrain.ranks.single_process import one_process

    overrides = [f"attention.variant={variant}", "data.directory=none", "precision.dtype=fp32"]
    config = load_config(config_name, overrides)
    architecture = architecture_of(config)
    out.mkdir(parents=True)
    with one_process() as context:
        weights = list(architecture.weights(build_model(config, context)))
        write_weights(out / "model.safetensors", weights, torch.float32)
    (out / "config.json").write_text(json.dumps(architecture.config_json(0, "float32")))


@torch.inference_mode()
def measure(model: Any, prompt: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Read a prompt, then write after it, one token at a time, the likeliest.

    Args:
        model: a causal model of transformers.
        prompt: token ids `[batch, length]`.
        tokens: how many to write after each prompt.

    Returns:
        Tokens per second of the prompt, and of what follows, over the whole batch.
    """
    started = clock(prompt.device)
    output = model(prompt, use_cache=True, logits_to_keep=1)
    read = clock(prompt.device)
    for _ in range(tokens):
        chosen = output.logits[:, -1:].argmax(-1)
        output = model(chosen, past_key_values=output.past_key_values, use_cache=True)
    written = clock(prompt.device)
    return prompt.numel() / (read - started), tokens * len(prompt) / (written - read)


def clock(device: torch.device) -> float:
    """Seconds, after all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_rounds(models: Sequence[Measured], prompt: torch.Tensor, tokens: int, rounds: int) -> None:
    """Run one round to warm up, then those that count, each in another order.

    Args:
        models: what is measured; each is given its numbers.
        prompt: token ids `[batch, length]`.
        tokens: how many to write after each prompt.
        rounds: how many count.
    """
    for number in range(rounds + 1):
        for one in in_turn(models, number):
            prefill, decode = measure(one.model, prompt, tokens)
            if number:
                one.prefill.append(prefill)
                one.decode.append(decode)


def print_table(models: Sequence[Measured]) -> None:
    """Print medians, and the median and range of the ratios to the first model, round by round."""
    print(
        f"{'model':24}{'prefill tok/s':>14}{'ratio (range)':>24}"
        f"{'decode tok/s':>14}{'ratio (range)':>24}"
    )
    for one in models:
        line = f"{one.name:24}"
        for rates, base in ((one.prefill, models[0].prefill), (one.decode, models[0].decode)):
            ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
            line += f"{statistics.median(rates):>14,.1f}{statistics.median(ratios):>10.3f}"
            line += f" ({min(ratios):.3f}-{max(ratios):.3f})"
        print(line)


def main() -> None:
    """Export the models, measure them in rounds, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", default="small", help="a shipped configuration")
    parser.add_argument("--variants", nargs="+", default=["vanilla", "orthogonal"])
    parser.add_argument("--prompt", type=int, default=256, help="tokens to read")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to write")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    options = parser.parse_args()
    require_transformers("benchmarks.inference")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    with tempfile.TemporaryDirectory() as directory:
        exports = [Path(directory) / name for name in options.variants]
        for path in exports:
            export_untrained(options.config, path.name, path)
        load = partial(AutoModelForCausalLM.from_pretrained, dtype=dtype)
        models = [Measured(path.name, load(path).to(options.device).eval()) for path in exports]
        models.append(
            Measured(f"{exports[0].name} again", load(exports[0]).to(options.device).eval())
        )
    vocabulary = models[0].model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.prompt)
    prompt = torch.randint(0, vocabulary, shape, generator=generator).to(options.device)
    run_rounds(models, prompt, options.tokens, options.rounds)
    print_table(models)


if __name__ == "__main__":
    main()
