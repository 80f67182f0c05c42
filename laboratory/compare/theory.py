"""The cost of a run by formula, to stand beside what was measured.

FLOPs and parameter counts come from `megatron_patches.recipe.counting`; the bytes of model states
are those of `report.definitions`. Optimizer state is once on each replica at stage 0, and without
the master weight if weights are fp32. Each tensor-parallel rank has its own copy of the parameters
that are not split (norms, learned positions, the shared half of low_rank): these count once per
rank. Not counted: ZeRO's padding and the headers of files.
"""

from __future__ import annotations

from dataclasses import dataclass

from laboratory.runs.finished import FinishedRun, ModelSize, StateBytes
from megatron_patches.errors import MethodError
from megatron_patches.recipe.counting import count_parameters, model_flops_per_token
from megatron_patches.recipe.optimizers import checkpoint_bytes, state_bytes
from pretrain.config.load import parse_config
from pretrain.errors import UserError

_BYTES = {"fp32": 4, "bf16": 2}
_MASTER_WEIGHT = 4


@dataclass(frozen=True)
class Theory:
    """Sizes and costs by formula.

    Attributes:
        phases: Number of phases of training.
        size: Parameters in the last phase, as in audit.json.
        model_flops_per_token: Model FLOPs of a training step, per token.
        executed_flops_per_token: The same without what is frozen, mean over all steps; what
            recomputation adds is not in it.
        states: Bytes in the last phase, sums over ranks.
    """

    phases: int
    size: ModelSize
    model_flops_per_token: float
    executed_flops_per_token: float
    states: StateBytes


def expected_cost(run: FinishedRun) -> Theory | None:
    """Return the costs by formula at a run's settings; None if this version cannot read them."""
    try:
        config = parse_config(run.config)
    except (UserError, MethodError):
        return None
    phases = config.phases
    tokens = config.tokens_per_step * config.total_steps
    count = count_parameters(config.shape, config.policy, phases[-1].number)
    tensor_parallel = config.parallel.tensor_model_parallel_size
    replicas = int(run.environment.get("world_size", tensor_parallel)) // tensor_parallel
    every = config.inventories[-1]
    whole = [tensor for tensor in every if tensor.trains and tensor.cut is None]
    # Parameters that are not split exist once more on every further tensor-parallel rank.
    again = tensor_parallel - 1
    rules = config.optimizer.rules
    held = count.trainable + again * sum(tensor.elements for tensor in whole)
    kept = state_bytes(every, rules) + again * state_bytes(whole, rules)
    stage = run.zero_stage
    weight = _BYTES[config.precision.dtype]
    gradient = _BYTES[config.precision.grad_accum_dtype if weight == 2 else "fp32"]
    # Without ZeRO an fp32 optimizer steps the weights themselves and keeps no copy.
    master = 0 if stage == 0 and weight == 4 else _MASTER_WEIGHT
    return Theory(
        phases=len(phases),
        size=ModelSize(count.trainable, count.frozen),
        model_flops_per_token=model_flops_per_token(config.shape, config.policy),
        executed_flops_per_token=config.total_flops / tokens,
        states=StateBytes(
            weight_bytes=held * weight * (1 if stage == 3 else replicas),
            frozen_bytes=count.frozen * weight * replicas,
            gradient_bytes=held * gradient * (1 if stage >= 2 else replicas),
            optimizer_state_bytes=(kept + held * master) * (replicas if stage == 0 else 1),
            checkpoint_bytes=checkpoint_bytes(every, rules),
        ),
    )
