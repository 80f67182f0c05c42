"""Everything about one configuration on a number of GPUs, and the same run with other attention beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_patches.errors import MethodError
from pretrain.config.counting import (
    ParameterCount,
    checkpoint_bytes,
    count_parameters,
    executed_flops_per_token,
    model_flops_per_token,
)
from pretrain.config.load import load_config, parse_config
from pretrain.config.refusals import check_layout
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.plan.advice import Fit, fit_of, nearest_counts
from pretrain.plan.devices import Gpu, find_gpu
from pretrain.plan.memory import Memory, memory_of
from pretrain.plan.roofline import StepSeconds, counted_attention, flops_again_per_token, step_seconds
from pretrain.plan.saving import Saving, saving
from pretrain.plan.tensors import rank_tensors


@dataclass(frozen=True)
class Request:
    """What is asked for, beside the configuration.

    Attributes:
        gpu: a name of the table, or the path of a card's description.
        baseline: the variant beside the configuration's own.
        price: of one GPU for an hour, in the user's currency; None: no cost.
        mtbf_hours: of one node.
        write_gb_s: of all ranks together, 1e9 bytes a second.
    """

    config: str
    overrides: Sequence[str]
    gpus: int
    gpu: str
    baseline: str
    price: float | None = None
    mtbf_hours: float = 1000.0
    write_gb_s: float = 2.0


@dataclass(frozen=True)
class Speed:
    """What the step's seconds come to.

    mfu and hfu count causal attention by half, mfu_full in full; None in fp32, which has no one peak.
    """

    tokens_per_second: float
    mfu: float | None
    mfu_full: float | None
    hfu: float | None
    days: float
    gpu_hours: float
    kwh: float
    cost: float | None


@dataclass(frozen=True)
class Flops:
    """Of one step over all ranks: if all weights trained, with attention in full, and as executed."""

    model: float
    model_full: float
    executed: float


@dataclass(frozen=True)
class Estimate:
    """One variant."""

    variant: str
    parameters: ParameterCount
    memory: Memory
    flops: Flops
    seconds: StepSeconds
    speed: Speed
    saving: Saving


@dataclass(frozen=True)
class Plan:
    """The answer. `baseline` is None where the configuration is of that variant already."""

    request: Request
    config: Config
    gpu: Gpu
    nodes: int
    chosen: Estimate
    baseline: Estimate | None
    fit: Fit


def make_plan(request: Request) -> Plan:
    """Work it all out; builds nothing and imports no torch.

    Raises:
        UserError: as `load_config`; a number of GPUs among which the batch cannot be shared, with the
            nearest that can; no such card.
    """
    gpu = find_gpu(request.gpu)
    config = load_config(request.config, request.overrides)
    alone = config.attention.variant == request.baseline
    beside = None if alone else _with_variant(config, request.baseline)
    try:
        check_layout(config, request.gpus)
    except UserError as error:
        raise UserError(f"{error}{nearest_counts(config, request.gpus)}") from None
    return Plan(
        request=request,
        config=config,
        gpu=gpu,
        nodes=_nodes(request.gpus, gpu),
        chosen=estimate(config, gpu, request),
        baseline=None if beside is None else estimate(beside, gpu, request),
        fit=fit_of(config, request.gpus, gpu),
    )


def estimate(config: Config, gpu: Gpu, request: Request) -> Estimate:
    """One configuration."""
    shape, attention = counted_attention(config)
    count, memory = count_parameters(shape, attention), memory_of(config, request.gpus)
    seconds = step_seconds(config, request.gpus, gpu, memory.states, rank_tensors(config, 0).trainable)
    tokens = config.tokens_per_step
    flops = Flops(
        model=tokens * model_flops_per_token(shape, attention),
        model_full=tokens * model_flops_per_token(shape, attention, 1.0),
        executed=tokens * (executed_flops_per_token(shape, attention) + flops_again_per_token(config)),
    )
    size = checkpoint_bytes(count)
    nodes = _nodes(request.gpus, gpu)
    return Estimate(
        variant=config.attention.variant,
        parameters=count,
        memory=memory,
        flops=flops,
        seconds=seconds,
        speed=_speed(config, gpu, request, flops, seconds.total),
        saving=saving(
            size, config.checkpoint.every, seconds.total, nodes, request.write_gb_s, request.mtbf_hours
        ),
    )


def _speed(config: Config, gpu: Gpu, request: Request, flops: Flops, step: float) -> Speed:
    peak = request.gpus * gpu.peak_tflops * 1e12 * step if config.precision.dtype == "bf16" else None
    hours = config.total_steps * step / 3600
    gpu_hours = hours * request.gpus
    return Speed(
        tokens_per_second=config.tokens_per_step / step,
        mfu=None if peak is None else flops.model / peak,
        mfu_full=None if peak is None else flops.model_full / peak,
        hfu=None if peak is None else flops.executed / peak,
        days=hours / 24,
        gpu_hours=gpu_hours,
        kwh=gpu_hours * gpu.watts / 1000,
        cost=None if request.price is None else gpu_hours * request.price,
    )


def _nodes(gpus: int, gpu: Gpu) -> int:
    return -(-gpus // gpu.gpus_per_node)


def _with_variant(config: Config, variant: str) -> Config:
    """The same run with another variant, and none of the axes that were set for its own."""
    values = config.resolved()
    values["attention"] = {"variant": variant}
    try:
        return parse_config(values)
    except (UserError, MethodError) as error:
        raise UserError(f"--baseline {variant}: {error}") from None
