"""The contenders of benchmarks.step.measure: our engines and the plain peer, and their turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rounds import in_turn
from benchmarks.step.plain_gpt import PlainGPT, plain_optimizers
from pretrain.config.load import config_from_draft
from pretrain.config.resolved import resolve
from pretrain.config.sources import Draft, apply_overrides
from pretrain.config.tree import Config
from pretrain.model.build import token_losses
from pretrain.ranks.gpu_settings import use_arithmetic
from pretrain.ranks.groups import ParallelContext
from pretrain.training.phase_engine import PhasedEngine

HEAD_DIM = 64
COMPILED, SHARDED = "plain compiled", "plain sharded"
PEERS = ("plain", COMPILED, SHARDED)
MODERN = (
    "model.norm=rmsnorm model.mlp=swiglu model.qk_norm=true model.tied_embeddings=false "
    "optimizer.betas=[0.9,0.95] optimizer.weight_decay=0.1"
)
RECIPES = {"gpt2": "", "modern": MODERN, "modern_muon": f"{MODERN} optimizer.kind=muon"}
"""Overrides that all contenders have, the peers too, by name."""
AGAIN = " again"
"""Ends the name of a control: the same thing once more, to show the noise."""


@dataclass(frozen=True)
class Shape:
    """Shape of a model and of a rank's batch, and the name of the recipe."""

    layers: int
    hidden: int
    batch: int
    length: int
    vocabulary: int = 2048
    recipe: str = "gpt2"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read LAYERSxHIDDENxBATCHxLENGTH, as 4x512x4x256; xVOCABULARY may follow.

        Raises:
            ValueError: the text has another form, or the hidden size is no multiple of 64.
        """
        sizes = [int(part) for part in text.split("x")]
        if len(sizes) not in (4, 5) or min(sizes) < 1 or sizes[1] % HEAD_DIM:
            raise ValueError(text)
        return cls(*sizes)

    def __str__(self) -> str:
        vocabulary = f"x{self.vocabulary}" if self.vocabulary != 2048 else ""
        return f"{self.layers}x{self.hidden}x{self.batch}x{self.length}{vocabulary}"


@dataclass(frozen=True)
class Layout:
    """Parallel layout of our engines."""

    tensor_parallel: int
    data_parallel: int


def benchmark_config(shape: Shape, variant: str, layout: Layout, settings: str = "") -> Config:
    """Return a run without data: rotary positions, no dropout.

    It is in fp32 without a GPU and in bf16 with one.

    Args:
        shape: Shape of the model and of a rank's batch, with the recipe.
        settings: More overrides, separated by spaces.
    """
    draft = Draft(
        "the benchmark's own run",
        {
            "run": {"name": variant},
            "model": {
                "num_layers": shape.layers,
                "hidden_size": shape.hidden,
                "num_attention_heads": shape.hidden // HEAD_DIM,
                "vocab_size": shape.vocabulary,
                "position_embedding": "rope",
                "dropout": 0.0,
            },
            "attention": {"variant": variant},
            "optimizer": {"learning_rate": 1e-4},
            "schedule": {"steps": 1000, "kind": "constant", "warmup_steps": 0},
            "data": {
                "directory": "none",
                "sequence_length": shape.length,
                "micro_batch_size": shape.batch,
                "global_batch_size": shape.batch * layout.data_parallel,
                "validate_every": 0,
                "validation_samples": 1,
            },
            "parallel": {"tensor_model_parallel_size": layout.tensor_parallel},
            "precision": {"dtype": "bf16" if torch.cuda.is_available() else "fp32"},
            "checkpoint": {"every": 0},
        },
    )
    apply_overrides(draft, [*RECIPES[shape.recipe].split(), *settings.split()])
    return config_from_draft(draft)


class Ours:
    """Training step of the program's own engine, in three parts."""

    def __init__(self, config: Config, context: ParallelContext) -> None:
        self.config = config
        self.trainer = PhasedEngine(resolve(config, context.world_size), context)
        self.engine: Any = self.trainer.engine
        self.model: torch.nn.Module = self.engine.module
        self.zero_stage: int | None = self.engine.zero_optimization_stage()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        use_arithmetic(
            deterministic=self.config.run.deterministic,
            reduced_precision_reduction=self.config.performance.reduced_precision_reduction,
        )
        return token_losses(self.engine, tokens).mean()

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        with self.trainer.actions.around_update(step=1):
            self.engine.step()


class Plain:
    """A training step of the peer: fp32 weights, and on a GPU autocast to bf16, as in nanoGPT.

    Compiled, if so, layer by layer, as ours are. Of several ranks each has the whole model under
    DDP, or if `sharded` its share of every layer under FSDP2, and a part of the samples, also where
    ours share them.
    """

    def __init__(
        self, config: Config, context: ParallelContext, compiled: bool, sharded: bool
    ) -> None:
        device, self.context = context.device, context
        model = PlainGPT(config).to(device)
        for weight in model.parameters():
            # As ours start: what is multiplied decides how much power a GPU draws.
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=config.model.init_std)
        if compiled:
            for block in model.blocks:
                block.compile()
        self.model: torch.nn.Module = model
        if sharded:
            for part in (*model.blocks, model):
                fully_shard(part, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
        elif dist.is_initialized() and dist.get_world_size() > 1:
            self.model = DistributedDataParallel(model)
        self.optimizers = plain_optimizers(self.model, config)
        self.clip = config.optimizer.gradient_clip
        self.autocast = device.type == "cuda"
        self.zero_stage: int | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        use_arithmetic(deterministic=False, reduced_precision_reduction=False)  # as ours by default
        tokens = tokens.chunk(self.context.tensor_parallel_size)[self.context.tensor_parallel_rank]
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            return self.model(tokens)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)


Contender: TypeAlias = Ours | Plain


def contender_name(kind: str, settings: str) -> str:
    """Return the name of a contender with these settings.

    Args:
        kind: One of `PEERS` or a variant.
        settings: overrides, separated by spaces; in the name, their keys go without their sections.
    """
    short = ", ".join(word.partition(".")[2] for word in settings.split())
    return f"{kind} ({short})" if short else kind


def build_contender(
    kind: str, settings: str, shape: Shape, layout: Layout, context: ParallelContext
) -> Contender:
    """Build a contender in plain PyTorch, or our engine of that variant with these settings.

    Args:
        kind: One of `PEERS` or a variant; " again" may follow.
        settings: Overrides of our engine, separated by spaces; not for a peer.
        shape: Shape of the model and of a rank's batch.
    """
    variant = kind.removesuffix(AGAIN)
    if variant not in PEERS:
        return Ours(benchmark_config(shape, variant, layout, settings), context)
    config = benchmark_config(shape, "vanilla", layout)
    return Plain(config, context, variant == COMPILED, variant == SHARDED)


WARM_UP_ROUNDS = 3


def take_turns(
    contenders: dict[str, Contender],
    batch: Callable[[], torch.Tensor],
    rounds: int,
    now: Callable[[], float],
    wait: Callable[[], None],
) -> dict[str, list[float]]:
    """Let contenders take steps in turns, in an order that rotates from round to round.

    Args:
        contenders: Contenders by name.
        batch: Function that makes the tokens of a round, `[batch, length + 1]`.
        rounds: Number of rounds that count, after WARM_UP_ROUNDS that do not.
        now: The clock, in seconds.
        wait: Function that brings ranks and GPUs to the same point.

    Returns:
        The seconds of every contender's step, round by round.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + WARM_UP_ROUNDS):
        tokens = batch()
        for name, contender in in_turn(list(contenders.items()), round_number):
            wait()
            started = now()
            contender.backward(contender.forward(tokens))
            contender.update()
            wait()
            if round_number >= WARM_UP_ROUNDS:
                times[name].append(now() - started)
    return times


def batches(shape: Shape, context: ParallelContext) -> Callable[[], torch.Tensor]:
    """Return a function that draws random tokens on this rank's device.

    Args:
        shape: Shape of the tokens, `[batch, length + 1]`, below its vocabulary.
        context: Context of this rank; ranks of one tensor-parallel group get the same tokens.
    """
    # Ranks of one tensor-parallel group need equal tokens, other replicas different ones.
    generator = torch.Generator().manual_seed(context.data_parallel_rank)
    size = (shape.batch, shape.length + 1)

    def batch() -> torch.Tensor:
        return torch.randint(0, shape.vocabulary, size, generator=generator).to(context.device)

    return batch


def waiting(context: ParallelContext) -> Callable[[], None]:
    """Return a function that synchronizes all ranks and their GPUs."""

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if context.world_size > 1:
            dist.barrier()

    return wait
