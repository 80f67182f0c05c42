"""Retrieval from the context by design, a table: `python -m tools.simulations.retrieval`.

    python -m tools.simulations.retrieval
    python -m tools.simulations.retrieval --recipe demo_modern --steps 600 --csv accuracies.csv

* recall: multi-query associative recall (Arora and others, 2023, arXiv:2312.04927): PAIRS pairs of
  a key and its value, then every key once more in another order, each to be followed by its value;
* induction: distinct tokens in random order, then the same order again from a random place on.

Loss and accuracy are of the answers alone. "Shifted": each key is mixed with the one before it.
The designs of the modern recipe are those of the study `documentation_modern`, at its rates; early
ones are frozen after a quarter of the steps.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_patches.engine.compat import prepare_imports
from pretrain.reporting.tables import Table, markdown
from pretrain.study.gaps import mean_over_seeds

if TYPE_CHECKING:
    from pretrain.config.tree import Config
    from pretrain.ranks.groups import ParallelContext

PAIRS, KEYS, BATCH, TESTED, SEEDS = 4, 16, 64, 512, 5
LENGTH, VOCABULARY = 4 * PAIRS - 1, 2 * KEYS
SHAPE = ("num_layers=2", "hidden_size=64", "num_attention_heads=4", f"vocab_size={VOCABULARY}")
DESIGNS = {
    "vanilla": "attention.variant=vanilla",
    "orthogonal": "attention.variant=orthogonal",
    "orthogonal+low_rank": "attention.variant=orthogonal attention.adapters=[low_rank]",
    "orthogonal_shared": "attention.variant=orthogonal_shared",
    "monarch": "attention.variant=monarch",
    "low_rank": "attention.variant=low_rank",
}
SHIFTED = "attention.taps=2 attention.convolved=key"
CONV4 = "attention.adapters=[short_convolution,query_key_bias,channel_scale]"
AT_3 = f"{CONV4} optimizer.learning_rate_factors={{'*_taps':3,'*.log_scale':3}}"
AT_10 = f"{CONV4} optimizer.learning_rate_factors={{'*_taps':10,'*.log_scale':10}}"
EARLY = "attention.phases=[{'at':0.25,'freeze':all}]"
MODERN = {
    "vanilla": "attention.variant=vanilla",
    "orthogonal": "attention.variant=orthogonal optimizer.learning_rate=2e-2",
    "multi_query": "attention.variant=vanilla model.num_query_groups=1",
    "fixed_output": "attention.variant=vanilla attention.frozen_roles=output",
    "early_vanilla": f"attention.variant=vanilla {EARLY}",
    "vanilla_conv4": f"attention.variant=vanilla {AT_3}",
    "early_vanilla_conv4": f"attention.variant=vanilla {EARLY} {AT_3}",
    "multi_query_conv4": f"attention.variant=vanilla model.num_query_groups=1 {AT_3}",
    "monarch_shared_conv4": f"attention.variant=monarch attention.shared=true {AT_10}",
    "trained_monarch_shared_conv4": (
        f"attention.variant=monarch_trainable attention.shared=true {AT_10}"
    ),
    "early_monarch_shared_conv4": (
        f"attention.variant=monarch_trainable attention.shared=true {EARLY} {AT_10}"
    ),
}
Task = Callable[[np.random.Generator, int], "Drawn"]
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


def shifted(overrides: str) -> str:
    """Return a design's overrides with shifted keys.

    Args:
        overrides: of the design, separated by spaces.
    """
    words = overrides.split()
    adapters = [word for word in words if word.startswith("attention.adapters=")]
    others = [word for word in words if word not in adapters]
    with_shift = "attention.adapters=[short_convolution]"
    if adapters:
        with_shift = f"{adapters[0][:-1]},short_convolution]"
    return " ".join([*others, with_shift, SHIFTED])


Trainer = tuple[torch.nn.Module, Any]
"""A model and its optimizer."""


def trainer(config: Config, context: ParallelContext, phase: int) -> Trainer:
    """Build the model of a phase and its optimizer.

    Args:
        config: Of the training.
        context: Of this process.
        phase: Number of the phase.
    """
    from pretrain.model.build import build_model
    from pretrain.training.engine import build_optimizer
    from pretrain.training.optimizers import clip_by_own_norm

    model = build_model(config, context, phase)
    optimizer = build_optimizer(model, config.optimizer)
    clip_by_own_norm(optimizer, config.optimizer.gradient_clip, context.tensor_parallel_group)
    return model, optimizer


def take_over(earlier: Trainer, model: torch.nn.Module, optimizer: Any) -> None:
    """Give a model and its optimizer the weights and states of the phase before.

    Args:
        earlier: Model and optimizer of that phase.
        model: The new model.
        optimizer: Its optimizer.
    """
    from megatron_patches.engine.freeze import lasting_weights

    weights = dict(lasting_weights(earlier[0]))
    with torch.no_grad():
        for name, weight in lasting_weights(model):
            weight.copy_(weights[name])
    trained = dict(earlier[0].named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            optimizer.state[parameter] = earlier[1].state[trained[name]]


def accuracy(draw: Task, recipe: str, overrides: str, *, steps: int, seed: int) -> float:
    """Train a model and return the percentage of right answers to fresh samples.

    Args:
        draw: The task.
        recipe: The configuration that the overrides change.
        overrides: of the design, separated by spaces.
        steps: Steps of the training.
        seed: Of the run and of its samples.
    """
    from pretrain.config.load import load_config
    from pretrain.config.schedule import learning_rate
    from pretrain.model.build import token_losses
    from pretrain.ranks.single_process import one_process

    own = [f"model.{key}" for key in SHAPE]
    own += [*overrides.split(), f"run.seed={seed}"]
    own += [f"schedule.steps={steps}", f"schedule.warmup_steps={steps // 10}"]
    own += [f"data.sequence_length={LENGTH}", "parallel.tensor_model_parallel_size=1"]
    config = load_config(recipe, own)
    with one_process() as context:
        phase = config.phase_at(0)
        model, optimizer = trainer(config, context, phase.number)
        for step in range(1, steps + 1):
            tokens, answers = map(
                torch.from_numpy, draw(np.random.default_rng((seed, step)), BATCH)
            )
            if config.phase_at(step) != phase:
                phase = config.phase_at(step)
                earlier = model, optimizer
                model, optimizer = trainer(config, context, phase.number)
                take_over(earlier, model, optimizer)
            rate = learning_rate(config.optimizer, config.schedule, step, steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["rate_factor"]
            optimizer.zero_grad()
            token_losses(model, tokens.to(context.device))[answers].mean().backward()
            optimizer.step()
        tokens, answers = map(torch.from_numpy, draw(np.random.default_rng(2**40), TESTED))
        inputs = tokens[:, :-1].to(context.device)
        with torch.no_grad():
            logits = model.eval()(inputs, torch.arange(LENGTH).to(inputs).expand_as(inputs), None)
        return 100 * float((logits.argmax(-1).cpu() == tokens[:, 1:])[answers].double().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, a row as soon as it is there."""
    parser = argparse.ArgumentParser(prog="retrieval", description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=("demo", "demo_modern"), default="demo")
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--csv", type=Path, help="file for the accuracy of each seed")
    given = parser.parse_args(arguments)
    prepare_imports()
    modern = given.recipe == "demo_modern"
    columns = [(task, shift) for task in (recall, induction) for shift in (False, True)]
    if modern:  # its designs bring their own convolution
        columns = [(recall, False), (induction, False)]
    rows, measured = [], []
    for design, overrides in (MODERN if modern else DESIGNS).items():
        rows.append([design])
        for draw, shift in columns:
            own = shifted(overrides) if shift else overrides
            right = {
                seed: accuracy(draw, given.recipe, own, steps=given.steps, seed=seed)
                for seed in range(1, SEEDS + 1)
            }
            task = draw.__name__ + (", shifted keys" if shift else "")
            measured += [(design, task, given.steps, *each) for each in right.items()]
            if gap := mean_over_seeds(right):
                rows[-1].append(f"{gap.mean:.1f} [{gap.low:.1f}, {gap.high:.1f}]")
            print(*rows[-1], *(f"{value:.0f}" for value in right.values()), flush=True)
    titles = list(dict.fromkeys(task for _, task, *_ in measured))
    if given.csv:
        with given.csv.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(("design", "task", "steps", "seed", "accuracy"))
            table.writerows(measured)
    print("\n".join(markdown(Table(("design", *titles), rows, (0,)))))


if __name__ == "__main__":
    main()
