"""Model, tokens and vocabulary of a trial, for a text, a machine and some minutes."""

from __future__ import annotations

from typing import Any

BATCH, LENGTH = 8, 128
PARAMETERS_TOKENS = 5e9
"""Parameters × tokens that one core of a server trains on in a second, of models of these sizes."""
OTHER_SECONDS = 75.0
"""Seconds of a trial that are not training: imports, tokenizer, shards, the comparison."""
MOST_EPOCHS = 10
SIZES = ((4, 128, 4), (6, 256, 8), (8, 512, 8))
"""(layers, hidden size, heads), by size."""


def training_seconds(minutes: float) -> float:
    """Return the seconds of a trial's minutes in which it trains."""
    return max(30.0, 60 * minutes - OTHER_SECONDS)


def plan_sizes(
    size: int, cores: float, seconds: float, vocab_size: int | None = None
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Choose sizes for a text.

    The model is the largest of SIZES that sees a token a parameter in the time, or the smallest.

    Args:
        size: Bytes of the text.
        cores: Cores of one run.
        seconds: Seconds to train a run for.
        vocab_size: Tokens of the vocabulary; None: by the size of the text.

    Returns:
        Settings of the runs, options of train-tokenizer, options of tokenize.
    """
    if vocab_size is None:
        vocab_size = 4096 if size >= 1_000_000 else 1024
    held_out = held_out_share(size)
    # About 3.5 bytes a token with 4,096 pieces, 2.7 with 1,024.
    text_tokens = size * (1 - held_out) / (3.5 if vocab_size >= 4096 else 2.7)
    work = PARAMETERS_TOKENS * cores * seconds
    shapes = [
        (parameters(layers, width, vocab_size), layers, width, heads)
        for layers, width, heads in SIZES
    ]
    epochs = MOST_EPOCHS * text_tokens
    fitting = (shape for shape in shapes if shape[0] <= min(work / shape[0], epochs))
    count, layers, width, heads = max(fitting, default=shapes[0])
    tokens = min(work / count, epochs)
    steps = max(20, round(tokens / (BATCH * LENGTH)))
    settings: dict[str, Any] = {
        "model.num_layers": layers,
        "model.hidden_size": width,
        "model.num_attention_heads": heads,
        "model.vocab_size": vocab_size,
        "data.sequence_length": LENGTH,
        "data.micro_batch_size": BATCH,
        "data.global_batch_size": BATCH,
        "data.validate_every": -(-steps // 4),
        "parallel.tensor_model_parallel_size": 1,
        "schedule.steps": steps,
        "schedule.warmup_steps": steps // 8,
        "checkpoint.every": -(-steps // 4),
    }
    return (
        settings,
        (f"--vocab-size={vocab_size}", "--sample-bytes=20000000"),
        (f"--validation-fraction={held_out:.3f}",),
    )


def held_out_share(size: int) -> float:
    """Return the share of a text of so many bytes that is held out.

    It is about eight documents, so that their loss is more than an accident.
    """
    documents = size / 16_384  # of texts that are cut; of others there are mostly more
    return min(0.5, max(0.05, 8 / documents))


def parameters(layers: int, width: int, vocab_size: int) -> int:
    """Return the approximate number of parameters, counting the embedding once.

    Args:
        layers: Number of layers.
        width: Width of the residual stream.
        vocab_size: Tokens of the vocabulary.
    """
    return 12 * layers * width**2 + vocab_size * width
