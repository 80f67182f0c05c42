"""Speed of exported models, prefill and decoding: a frozen one beside an ordinary one.

    OMP_NUM_THREADS=1 python -m benchmarks.inference [--config small] [--rounds 8] [--json FILE]

Untrained models of a shipped configuration are exported first: speed does not depend on the
weights' values. Measured are one forward pass of transformers over a prompt, and the same with
tokens written after it, one at a time, with the cache of keys and values. Frozen rows are stored
like any others, so both models are the same computation: the ratio should be 1, and the rows of the
first model again show how far chance takes it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.rounds import options_parser, report, take_turns
from pretrain.config.load import load_config

PROMPT, TOKENS = 256, 32


def export_untrained(config_name: str, variant: str, out: Path) -> None:
    """Export an untrained model: its initial weights and config.json.

    Args:
        config_name: A shipped configuration.
        variant: Variant of its attention.
        out: The directory to make.
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
def write(model: Any, prompt: torch.Tensor, tokens: int) -> None:
    """Read a prompt, then generate tokens greedily, one at a time.

    Args:
        model: A causal model of transformers.
        prompt: Token ids `[batch, length]`.
        tokens: Number of tokens to write.
    """
    # Only the last position is needed; logits of the whole prompt would cost time and memory.
    output = model(prompt, use_cache=True, logits_to_keep=1)
    for _ in range(tokens):
        chosen = output.logits[:, -1:].argmax(-1)
        output = model(chosen, past_key_values=output.past_key_values, use_cache=True)


def main() -> None:
    """Export the models, measure them in rounds, and print the table."""
    parser = options_parser(__doc__, rounds=8)
    parser.add_argument("--config", default="small", help="a shipped configuration")
    options = parser.parse_args()
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for variant in ("vanilla", "orthogonal"):
            export_untrained(options.config, variant, Path(directory, variant))
        for name in ("vanilla", "orthogonal", "vanilla again"):
            folder = Path(directory, name.split()[0])
            models[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocabulary = models["vanilla"].config.vocab_size
    prompt = torch.randint(0, vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    actions: dict[str, Callable[[], object]] = {}
    for way, tokens in (("prefill", 0), (f"prefill and {TOKENS} tokens", TOKENS)):
        for name, model in models.items():
            actions[f"{way}: {name}"] = partial(write, model, prompt, tokens)
    report(take_turns(actions, options.rounds, time.perf_counter), options.json)


if __name__ == "__main__":
    main()
