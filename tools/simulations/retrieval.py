"""Retrieval from the context by design, a table: `python -m tools.simulations.retrieval`.

* recall: multi-query associative recall (Arora and others, 2023, arXiv:2312.04927): PAIRS pairs of
  a key and its value, then every key once more in another order, each to be followed by its value;
* induction: distinct tokens in random order, then the same order again from a random place on.

Loss and accuracy are of the answers alone. "Shifted": each key is mixed with the one before it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from megatron_patches.engine.compat import prepare_imports
from pretrain.reporting.tables import Table, markdown
from pretrain.study.gaps import SCORES, paired_gap

PAIRS, KEYS, BATCH, STEPS, TESTED, SEEDS = 4, 16, 64, 200, 512, 5
LENGTH, VOCABULARY = 4 * PAIRS - 1, 2 * KEYS
DESIGNS = (
    "vanilla",
    "orthogonal",
    "orthogonal+low_rank",
    "orthogonal_shared",
    "monarch",
    "low_rank",
)
SHAPE = ("num_layers=2", "hidden_size=64", "num_attention_heads=4", f"vocab_size={VOCABULARY}")
SHIFTED = ("attention.taps=2", "attention.convolved=key")
Drawn = tuple[np.ndarray, np.ndarray]
"""Samples `[samples, LENGTH + 1]`, and which of the predictions `[samples, LENGTH]` are answers."""


def recall(numbers: np.random.Generator, samples: int) -> Drawn:
    """Draw samples of the first task.

    Args:
        numbers: Where chance comes from.
        samples: How many.
    """
    every, places = (np.tile(np.arange(size), (samples, 1)) for size in (KEYS, PAIRS))
    keys, values = (numbers.permuted(every, axis=1)[:, :PAIRS] + first for first in (0, KEYS))
    pairs = np.stack((keys, values), axis=2)
    asked = np.take_along_axis(pairs, numbers.permuted(places, axis=1)[..., None], axis=1)
    answers = (np.arange(LENGTH) >= 2 * PAIRS) & (np.arange(LENGTH) % 2 == 0)
    return np.concatenate((pairs, asked), axis=1).reshape(samples, -1), np.tile(
        answers, (samples, 1)
    )


def induction(numbers: np.random.Generator, samples: int) -> Drawn:
    """Draw samples of the second task.

    The first token of the order follows no other, so it is no answer.

    Args:
        numbers: Where chance comes from.
        samples: How many.
    """
    every = np.tile(np.arange(VOCABULARY), (samples, 1))
    half = 2 * PAIRS
    first = numbers.permuted(every, axis=1)[:, :half]
    places = (numbers.integers(half, size=(samples, 1)) + np.arange(half)) % half
    answers = np.concatenate((np.zeros((samples, half), bool), places[:, :-1] < half - 1), axis=1)
    return np.concatenate((first, np.take_along_axis(first, places, axis=1)), axis=1), answers


def accuracy(draw: Callable[..., Drawn], design: str, shifted: bool, seed: int) -> float:
    """Train a model and return the percentage of right answers to fresh samples.

    Args:
        draw: The task.
        design: A variant and its adapters, joined by "+".
        shifted: Whether keys are mixed with the one before.
        seed: Of the run and of its samples.
    """
    from pretrain.config.load import load_config
    from pretrain.config.schedule import learning_rate
    from pretrain.model.build import build_model, token_losses
    from pretrain.ranks.single_process import one_process
    from pretrain.training.engine import build_optimizer
    from pretrain.training.optimizers import clip_by_own_norm

    variant, *adapters = (f"{design}+short_convolution" if shifted else design).split("+")
    own = [
        f"attention.variant={variant}",
        f"attention.adapters=[{', '.join(adapters)}]",
        f"run.seed={seed}",
    ]
    own += [
        f"schedule.steps={STEPS}",
        f"schedule.warmup_steps={STEPS // 10}",
        *(SHIFTED if shifted else ()),
    ]
    own += [f"data.sequence_length={LENGTH}", "parallel.tensor_model_parallel_size=1"]
    config = load_config("demo", [*(f"model.{key}" for key in SHAPE), *own])
    with one_process() as context:
        model = build_model(config, context)
        adamw = build_optimizer(model, config.optimizer)
        clip_by_own_norm(adamw, config.optimizer.gradient_clip, context.tensor_parallel_group)
        for step in range(1, STEPS + 1):
            tokens, answers = map(
                torch.from_numpy, draw(np.random.default_rng((seed, step)), BATCH)
            )
            rate = learning_rate(config.optimizer, config.schedule, step, STEPS)
            for group in adamw.param_groups:
                group["lr"] = rate * group["rate_factor"]
            adamw.zero_grad()
            token_losses(model, tokens.to(context.device))[answers].mean().backward()
            adamw.step()
        tokens, answers = map(torch.from_numpy, draw(np.random.default_rng(2**40), TESTED))
        inputs = tokens[:, :-1].to(context.device)
        with torch.no_grad():
            logits = model.eval()(inputs, torch.arange(LENGTH).to(inputs).expand_as(inputs), None)
        return 100 * float((logits.argmax(-1).cpu() == tokens[:, 1:])[answers].double().mean())


if __name__ == "__main__":
    prepare_imports()
    rows = []
    for design in DESIGNS:
        rows.append([design])
        for draw, shifted in (
            (recall, False),
            (recall, True),
            (induction, False),
            (induction, True),
        ):
            right = {seed: accuracy(draw, design, shifted, seed) for seed in range(1, SEEDS + 1)}
            if gap := paired_gap("", right, dict.fromkeys(right, 0.0), SCORES):
                rows[-1].append(f"{gap.mean:.1f} [{gap.low:.1f}, {gap.high:.1f}]")
            print(*rows[-1], flush=True)
    header = ("design", "recall", "recall, shifted keys", "induction", "induction, shifted keys")
    print("\n".join(markdown(Table(header, rows, (0,)))))
