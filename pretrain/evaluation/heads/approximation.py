"""E1: can the model class approximate a function of a sequence, and how does the error fall with size?

The function is Nadaraya–Watson regression in context. Each position t has a point x_t, uniform in
[−1, 1]², and a value z_t, uniform in [−1, 1]; the target is the kernel mean of the values so far,

    y_t = Σ_{s ≤ t} K(x_t, x_s) z_s / Σ_{s ≤ t} K(x_t, x_s),    K(x, x') = exp(−‖x − x'‖² / (2 σ²)),  σ = 0.3

continuous, causal, blind to order, and not computable without comparing contents of positions. The model is
this program's own transformer block (the one that is pretrained, without positions) between a linear map of
(x_t, z_t) and a linear read-out, trained on fresh samples at every step, so the error is of approximation and
optimisation, never of generalisation from a finite set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_patches.engine.freeze import parameter_groups
from megatron_patches.model.initialize import normal_rows
from pretrain.config.load import load_config
from pretrain.config.schedule import learning_rate
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.model.build import build_model
from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.single_process import one_process
from pretrain.reporting.progress import WorkDisplay

LENGTH, BATCH, TEST_SEQUENCES = 32, 32, 512
BANDWIDTH = 0.3
HEADS = 4
FEATURES = 3
TEST_SEED = 2**40
"""Far from any training seed, which is (seed, step) below."""


@dataclass(frozen=True)
class Experiment:
    """The grid: every variant × width (hidden_size) × depth (num_layers) × seed 1 … `seeds`.

    The first variant is what the others are compared with.
    """

    variants: tuple[str, ...]
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    seeds: int
    steps: int
    learning_rate: float

    def config(self, variant: str, width: int, depth: int, seed: int) -> Config:
        """The model and its optimizer as a run's configuration.

        Raises:
            UserError: a variant that is unknown or is more than a model, or a width that HEADS does not
                divide.
        """
        values = {
            "run.name": "approximation",
            "run.seed": seed,
            "attention.variant": variant,
            "model.num_layers": depth,
            "model.hidden_size": width,
            "model.num_attention_heads": HEADS,
            "model.vocab_size": 2,  # of an embedding that is not used
            "data.sequence_length": LENGTH,
            "optimizer.learning_rate": self.learning_rate,
            "schedule.steps": self.steps,
            "schedule.warmup_steps": self.steps // 10,
            "parallel.tensor_model_parallel_size": 1,
        }
        config = load_config("demo", [f"{key}={value}" for key, value in values.items()])
        policy = config.policy()
        if policy.penalty or policy.unfreeze:
            raise UserError(
                f"--variants has '{variant}', whose penalty or schedule belongs to the training loop of a "
                "run and would do nothing in this experiment; leave it out"
            )
        return config


@dataclass(frozen=True)
class Trial:
    """One trained model. `error`: mean squared error on the test set / variance of the targets there."""

    variant: str
    width: int
    depth: int
    seed: int
    error: float
    trainable_parameters: int


def run_experiment(experiment: Experiment) -> list[Trial]:
    """Every trial of the grid, in a fixed order; deterministic on one machine.

    Raises:
        UserError: as `Experiment.config`, before anything is trained.
    """
    plan = [
        (variant, width, depth, seed)
        for width in experiment.widths
        for depth in experiment.depths
        for variant in experiment.variants
        for seed in range(1, experiment.seeds + 1)
    ]
    configs = [experiment.config(*place) for place in plan]
    trials = []
    with one_process() as context, WorkDisplay(len(plan)) as work:
        for (variant, width, depth, seed), config in zip(plan, configs, strict=True):
            work.begin(f"{variant}, width {width}, depth {depth}, seed {seed}")
            regressor = Regressor(config, context)
            error = train(regressor, config)
            count = sum(p.numel() for p in regressor.parameters() if p.requires_grad)
            trials.append(Trial(variant, width, depth, seed, error, count))
    return trials


class Regressor(torch.nn.Module):
    """`[batch, seq, FEATURES]` -> `[batch, seq]` through the decoder of `build_model`."""

    def __init__(self, config: Config, context: ParallelContext) -> None:
        super().__init__()
        self.decoder: TransformerBlock = build_model(config, context).decoder
        width = config.model.hidden_size
        rows = partial(normal_rows, config.run.seed)
        self.embed = torch.nn.Parameter(rows("regression.input", range(width), FEATURES, FEATURES**-0.5))
        self.read_out = torch.nn.Parameter(rows("regression.output", range(1), width, width**-0.5)[0])
        self.to(context.device)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = (features @ self.embed.t()).transpose(0, 1).contiguous()  # [seq, batch, hidden]
        return (self.decoder(hidden, attention_mask=None) @ self.read_out).transpose(0, 1)


def train(regressor: Regressor, config: Config) -> float:
    """Train on fresh samples, the same for every variant; the normalised error on the test set."""
    device = regressor.embed.device
    optimizer = torch.optim.AdamW(
        parameter_groups(regressor, config.optimizer.weight_decay),
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )
    for step in range(1, config.total_steps + 1):
        features, targets = kernel_regression(config.run.seed * 2**20 + step, BATCH)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, config.schedule, step, config.total_steps)
        loss = (regressor(features.to(device)) - targets.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(regressor.parameters(), config.optimizer.gradient_clip)
        optimizer.step()
    features, targets = kernel_regression(TEST_SEED, TEST_SEQUENCES)
    regressor.eval()
    with torch.no_grad():
        squares = (regressor(features.to(device)).cpu() - targets).square()
    return float(squares.mean(dtype=torch.float64) / targets.double().var())


def kernel_regression(seed: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs `[sequences, LENGTH, FEATURES]` and their targets `[sequences, LENGTH]`, float32."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(sequences, LENGTH, FEATURES, generator=generator) * 2 - 1
    points, values = features[..., :2], features[..., 2]
    distances = (points[:, :, None] - points[:, None]).square().sum(-1)
    kernel = torch.exp(-distances / (2 * BANDWIDTH**2)).tril()
    return features, (kernel @ values[..., None])[..., 0] / kernel.sum(-1)


def errors(trials: Sequence[Trial], variant: str, width: int, depth: int) -> list[float]:
    """The errors of one place in the grid, by seed."""
    found = [t for t in trials if (t.variant, t.width, t.depth) == (variant, width, depth)]
    return [trial.error for trial in sorted(found, key=lambda trial: trial.seed)]
