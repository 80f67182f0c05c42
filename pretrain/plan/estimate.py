"""The estimate of a run on a number of GPUs, beside the same run with other attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_patches.errors import MethodError
from megatron_patches.recipe.counting import (
    ParameterCount,
    count_parameters,
    model_flops_per_token,
)
from megatron_patches.recipe.optimizers import checkpoint_bytes
from megatron_patches.recipe.variants import policy_for
from pretrain.config.load import load_config, parse_config
from pretrain.config.refusals import matching, names_for_factors
from pretrain.config.resolved import Resolved, resolve
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.plan.advice import Fit, fit_of, nearest_counts
from pretrain.plan.cards import Gpu, find_gpu
from pretrain.plan.duration import StepSeconds, step_seconds, update_flops
from pretrain.plan.horizon import Horizon, horizon_of
from pretrain.plan.memory import Memory, memory_of, rank_tensors
from pretrain.plan.products import Products
from pretrain.plan.workload import Workload, workload_of


@dataclass(frozen=True)
class Request:
    """A question to `plan`.

    Attributes:
        gpu: A card's name in the table, or the path of its description.
        price: Price of one GPU for an hour, in the user's currency; None: no cost.
        write_gb_s: Write rate of all ranks together, 1e9 bytes a second.
        chinchilla: Tokens for each parameter, for `Plan.horizon`; None: no horizon.
    """

    config: str
    overrides: Sequence[str]
    gpus: int
    gpu: str
    baseline: str
    price: float | None = None
    mtbf_hours: float = 1000.0
    write_gb_s: float = 2.0
    chinchilla: float | None = None


@dataclass(frozen=True)
class Speed:
    """Rates and costs of the whole run, under the names of the JSON.

    mfu and hfu count half of causal attention; all three are None in fp32, which has no one peak.
    """

    tokens_per_second: float
    mfu: float | None
    mfu_full_attention: float | None
    hfu: float | None
    run_days: float
    run_gpu_hours: float
    run_kwh: float
    run_cost: float | None


@dataclass(frozen=True)
class Flops:
    """FLOPs of one step over all ranks.

    Attributes:
        model: FLOPs of the model, causal attention counted by half.
        model_full: FLOPs of the model, attention counted in full.
        executed: FLOPs executed in forward and backward passes.
        update: FLOPs of the matrix products in the update.
    """

    model: float
    model_full: float
    executed: float
    update: float


@dataclass(frozen=True)
class Saving:
    """Cost of checkpoints, and the best interval between them (Young 1974, Daly 2006).

    Attributes:
        write_seconds: Time to write a checkpoint, during which no step is made.
        young_daly_seconds: Interval at which writing and lost work together cost least, √(2 δ M)
            with δ the seconds of one checkpoint and M the job's mean time between failures.
        lost_share, lost_share_at_young_daly: Share of the time spent on writing and lost work.
        every_seconds: The configuration's interval; None: only at the end.
    """

    bytes: int
    write_seconds: float
    mean_hours_between_failures: float
    young_daly_seconds: float
    young_daly_steps: int
    lost_share_at_young_daly: float
    every_steps: int
    every_seconds: float | None
    lost_share: float | None


@dataclass(frozen=True)
class PhaseCost:
    """Sizes and costs of one training phase.

    Attributes:
        first_step: First optimizer step of the phase, counted from 1.
        steps: Number of steps in the phase.
        checkpoint_bytes: Size of a checkpoint in the phase.
    """

    first_step: int
    steps: int
    parameters: ParameterCount
    memory: Memory
    flops: Flops
    seconds: StepSeconds
    checkpoint_bytes: int


@dataclass(frozen=True)
class Estimate(PhaseCost):
    """Costs with one variant of attention: those of the phase in which most weights train, and all.

    Attributes:
        speed, saving: Of the whole run.
        phases: Costs of each phase of the run.
    """

    variant: str
    speed: Speed
    saving: Saving
    phases: tuple[PhaseCost, ...]


@dataclass(frozen=True)
class Plan:
    """The answer to a request.

    `baseline` is None where the configuration has that variant already, or the variant is refused.

    Attributes:
        work: Workload of the configuration's own variant.
        refusal: Reason why there is no baseline; None: the variant is not refused.
        horizon: Horizon by the rule that `Request.chinchilla` asks for.
    """

    request: Request
    config: Config
    work: Workload
    gpu: Gpu
    nodes: int
    chosen: Estimate
    baseline: Estimate | None
    refusal: str | None
    fit: Fit
    horizon: Horizon | None


def make_plan(request: Request) -> Plan:
    """Return the plan of a configuration, without building a model or importing torch.

    Raises:
        UserError: as `load_config`; the batch cannot be shared among so many GPUs (the error names
            the nearest numbers); no such card.
    """
    gpu = find_gpu(request.gpu)
    config = load_config(request.config, request.overrides)
    try:
        baseline = policy_for(request.baseline)
    except MethodError as error:
        raise UserError(f"--baseline {request.baseline}: {error}") from None
    try:
        resolved = resolve(config, request.gpus)
    except UserError as error:
        raise UserError(f"{error}{nearest_counts(config, request.gpus)}") from None
    baseline_resolved = None
    refusal = None
    if config.policy != baseline:
        try:
            baseline_resolved = resolve(_with_variant(config, request.baseline), request.gpus)
        except (UserError, MethodError) as error:
            refusal = str(error)
    return Plan(
        request=request,
        config=config,
        work=workload_of(resolved),
        gpu=gpu,
        nodes=_nodes(request.gpus, gpu),
        chosen=estimate(resolved, gpu, request),
        baseline=None if baseline_resolved is None else estimate(baseline_resolved, gpu, request),
        refusal=refusal,
        fit=fit_of(resolved, int(gpu.memory_gb * 1e9)),
        horizon=horizon_of(resolved, request.chinchilla) if request.chinchilla else None,
    )


def estimate(resolved: Resolved, gpu: Gpu, request: Request) -> Estimate:
    """Return the estimate of one configuration."""
    config = resolved.config
    phases = tuple(phase_cost(resolved, gpu, request, n) for n in range(len(config.phases)))
    fullest = phases[config.fullest_phase]
    seconds = sum(phase.steps * phase.seconds.total for phase in phases)
    step = fullest.seconds.total
    return Estimate(
        **vars(fullest),
        variant=config.attention.variant,
        speed=_speed(config, gpu, request, fullest.flops, step=step, run=seconds),
        saving=saving(
            fullest.checkpoint_bytes,
            every=config.checkpoint.every,
            step_seconds=step,
            nodes=_nodes(request.gpus, gpu),
            write_gb_s=request.write_gb_s,
            mtbf_hours=request.mtbf_hours,
        ),
        phases=phases,
    )


def phase_cost(resolved: Resolved, gpu: Gpu, request: Request, number: int) -> PhaseCost:
    """Return sizes and costs of one training phase.

    Args:
        number: Number of the phase, from 0.
    """
    config = resolved.config
    bounds = [*(phase.first_step for phase in config.phases), config.total_steps + 1]
    work = workload_of(resolved, phase=number)
    passes = config.gradient_accumulation_steps(request.gpus)
    memory = memory_of(work)
    trainable = rank_tensors(work, 0).trainable
    tokens = config.tokens_per_step
    executed = Products(work.shape, work.policy, number).hardware(config.performance)
    return PhaseCost(
        first_step=bounds[number],
        steps=bounds[number + 1] - bounds[number],
        parameters=count_parameters(work.shape, work.policy, number),
        memory=memory,
        flops=Flops(
            model=tokens * model_flops_per_token(work.shape, work.policy),
            model_full=tokens * model_flops_per_token(work.shape, work.policy, 1.0),
            executed=tokens * executed,
            update=update_flops(work),
        ),
        seconds=step_seconds(work, gpu, passes, memory.states, trainable=trainable),
        checkpoint_bytes=checkpoint_bytes(work.tensors(), config.optimizer.rules),
    )


def _speed(
    config: Config, gpu: Gpu, request: Request, flops: Flops, *, step: float, run: float
) -> Speed:
    """Return the rates of a run whose step takes `step` seconds, and all steps `run`."""
    in_bf16 = config.precision.dtype == "bf16"
    peak = request.gpus * gpu.peak_tflops * 1e12 * step if in_bf16 else None
    hours = run / 3600
    gpu_hours = hours * request.gpus
    return Speed(
        tokens_per_second=config.tokens_per_step / step,
        mfu=None if peak is None else flops.model / peak,
        mfu_full_attention=None if peak is None else flops.model_full / peak,
        hfu=None if peak is None else flops.executed / peak,
        run_days=hours / 24,
        run_gpu_hours=gpu_hours,
        run_kwh=gpu_hours * gpu.watts / 1000,
        run_cost=None if request.price is None else gpu_hours * request.price,
    )


def saving(
    size: int, every: int, step_seconds: float, nodes: int, write_gb_s: float, mtbf_hours: float
) -> Saving:
    """Return the cost of checkpoints.

    Args:
        size: Bytes of a checkpoint.
        every: Steps between checkpoints; 0: only at the end.
        step_seconds: Seconds of a training step.
        nodes: Number of machines, each of which fails on its own.
        write_gb_s: Write rate of all ranks together, 1e9 bytes a second.
        mtbf_hours: Mean time between failures of one node.
    """
    seconds = size / (write_gb_s * 1e9)
    failure = mtbf_hours * 3600 / nodes
    best = math.sqrt(2 * seconds * failure)
    steps = max(1, round(best / step_seconds))
    interval = every * step_seconds if every else None

    # A failure loses half an interval on average.
    def lost(after: float) -> float:
        return min(1.0, seconds / after + after / (2 * failure))

    return Saving(
        bytes=size,
        write_seconds=seconds,
        mean_hours_between_failures=failure / 3600,
        young_daly_seconds=steps * step_seconds,
        young_daly_steps=steps,
        lost_share_at_young_daly=lost(steps * step_seconds),
        every_steps=every,
        every_seconds=interval,
        lost_share=None if interval is None else lost(interval),
    )


def _nodes(gpus: int, gpu: Gpu) -> int:
    return -(-gpus // gpu.gpus_per_node)


def _with_variant(config: Config, variant: str) -> Config:
    """Return the same run with another variant, without settings that only its own variant has.

    Raises:
        UserError, MethodError: the variant contradicts the rest of the run.
    """
    values = config.as_dict()
    values["attention"] = {"variant": variant}
    values["telemetry"]["spectral_norms"] = []
    if config.performance.recompute == "query_key" and not policy_for(variant).only_frozen_factors:
        values["performance"]["recompute"] = "none"
    optimizer = values["optimizer"]
    # Patterns that match no weight of the other variant would be refused.
    factors = {key: optimizer.pop(key) for key in names_for_factors(config)}
    for key, names in names_for_factors(parse_config(values)).items():
        optimizer[key] = {
            pattern: factors[key][pattern] for pattern in matching(factors[key], names)
        }
    return parse_config(values)
