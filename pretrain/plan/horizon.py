"""Horizon, batch and learning rate of a run by published rules, as overrides to paste.

The horizon is a number of tokens for each parameter, where all parameters count, as in Hoffmann et
al. (2022, https://arxiv.org/abs/2203.15556; about 20 is best for a given number of FLOPs). Batch
and learning rate follow Step Law (Li et al. 2025, https://arxiv.org/abs/2503.04715): power laws
fitted to searches with AdamW, where N leaves out embeddings and output layer:

    B = 0.58 D^0.571 tokens        rate = 1.79 N^-0.713 D^0.307

Neither rule knows frozen weights. Here they count, and every variant counts as the model with
ordinary attention, so that all variants of a comparison get one horizon, batch and rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patches.recipe.optimizers import Muon
from megatron_patches.recipe.tensors import tensors
from megatron_patches.recipe.variants import ORDINARY, VARIANTS
from pretrain.config.resolved import Resolved
from pretrain.config.sources import override_text
from pretrain.config.tree import Config

TOKENS_RULE = "Hoffmann et al. 2022, arXiv 2203.15556"
STEP_LAW = "Step Law, Li et al. 2025, arXiv 2503.04715"
FITTED_PARAMETERS = (214_663_680, 1_073_741_824)
FITTED_TOKENS = (4_000_000_000, 100_000_000_000)
"""The smallest and largest N and D of the dense models whose searches Step Law's authors publish
(`data/dense_lr_bs_loss.csv` of github.com/step-law/steplaw)."""
WARMUP_STEPS = 2000
WARMUP_SHARE = 0.1
_VOCABULARY = ("embedding", "output_layer")


@dataclass(frozen=True)
class Horizon:
    """Tokens, batch and rate by the rules, and the nearest values that the run's layout allows.

    Attributes:
        parameters: All of the model with ordinary attention, frozen ones too; the tokens' N.
        inner_parameters: Parameters without embeddings and output layer; Step Law's N.
        tokens: Training tokens.
        batch_tokens: Tokens of a step by Step Law; `global_batch_size` is the nearest number of
            samples that the ranks can share.
        learning_rate: Peak rate by Step Law, rounded to three digits.
        steps: Optimizer steps of the run, with `warmup_steps` of this program's choice.
        rate_holds: False if the optimizer's rates are on another scale than AdamW's; then no
            override names the rate.
        overrides: `section.key=value` words.
    """

    tokens_per_parameter: float
    parameters: int
    inner_parameters: int
    tokens: int
    batch_tokens: int
    global_batch_size: int
    learning_rate: float
    steps: int
    warmup_steps: int
    rate_holds: bool
    overrides: tuple[str, ...]


def horizon_of(resolved: Resolved, tokens_per_parameter: float) -> Horizon:
    """Return horizon, batch and rate of a configuration on its ranks.

    Args:
        tokens_per_parameter: Training tokens for each parameter, such as 20.
    """
    config = resolved.config
    counted = tensors(config.shape, VARIANTS[ORDINARY])
    parameters = sum(tensor.elements for tensor in counted)
    outside = (tensor for tensor in counted if tensor.name.partition(".")[0] in _VOCABULARY)
    inner = parameters - sum(tensor.elements for tensor in outside)
    tokens = max(1, round(tokens_per_parameter * parameters))
    batch_tokens = 0.58 * tokens**0.571
    shared = config.data.micro_batch_size * resolved.layout.data_parallel_size
    samples = shared * max(1, round(batch_tokens / config.data.sequence_length / shared))
    steps = -(-tokens // (samples * config.data.sequence_length))
    rate = float(f"{1.79 * inner**-0.713 * tokens**0.307:.2e}")
    warmup = min(WARMUP_STEPS, int(WARMUP_SHARE * steps))
    rate_holds = all(rule.takes_adamw_rates for rule in config.optimizer.rules)
    # One key alone gives a run's length.
    lengths = {"steps": config.schedule.steps, "flops": config.schedule.flops}
    values: dict[str, float | None] = {
        f"schedule.{key}": None for key, length in lengths.items() if length is not None
    }
    values |= {"schedule.tokens": tokens, "schedule.warmup_steps": warmup}
    values["data.global_batch_size"] = samples
    if rate_holds:
        values["optimizer.learning_rate"] = rate
        kind = config.optimizer.kind
        for key, other_rate in getattr(config.optimizer, kind, ()):
            if key.endswith("_learning_rate") and other_rate is not None:
                scaled = other_rate * rate / config.optimizer.learning_rate
                values[f"optimizer.{kind}.{key}"] = float(f"{scaled:.2e}")
    return Horizon(
        tokens_per_parameter=tokens_per_parameter,
        parameters=parameters,
        inner_parameters=inner,
        tokens=tokens,
        batch_tokens=round(batch_tokens),
        global_batch_size=samples,
        learning_rate=rate,
        steps=steps,
        warmup_steps=warmup,
        rate_holds=rate_holds,
        overrides=tuple(override_text(key, value) for key, value in values.items()),
    )


def sentences(horizon: Horizon, config: Config) -> list[str]:
    """Return the rules with their numbers, one sentence each, without the overrides."""
    length = config.data.sequence_length
    lines = [
        f"tokens: {horizon.tokens_per_parameter:g} for each of {horizon.parameters:,} parameters "
        f"= {horizon.tokens:,} ({TOKENS_RULE}); embeddings and frozen weights are counted, each "
        f"variant as {ORDINARY}",
        f"batch: 0.58 D^0.571 = {horizon.batch_tokens:,} tokens for D tokens ({STEP_LAW}); "
        f"{horizon.global_batch_size:,} samples, which the ranks can share, are "
        f"{horizon.global_batch_size * length:,}: {horizon.steps:,} steps",
        f"rate: 1.79 N^-0.713 D^0.307 = {horizon.learning_rate:g} for the N = "
        f"{horizon.inner_parameters:,} parameters without embeddings and output layer (the same "
        "law, of AdamW)",
        f"warmup: {horizon.warmup_steps:,} steps, of neither rule: {WARMUP_STEPS:,}, or "
        f"{WARMUP_SHARE:.0%} of the run if that is less",
    ]
    fitted = {horizon.inner_parameters: FITTED_PARAMETERS, horizon.tokens: FITTED_TOKENS}
    if any(not least <= value <= most for value, (least, most) in fitted.items()):
        lines.append(
            "Step Law's published searches are of 215 to 1,074 M parameters and 4 to 100 B tokens: "
            "this run lies outside, so search the rate"
        )
    optimizer = config.optimizer.of_kind
    if not horizon.rate_holds:
        name = config.optimizer.kind
        if isinstance(optimizer, Muon):
            name = f"Muon with update_scale {optimizer.update_scale}"
        lines.append(f"AdamW's rate says nothing of {name}, so none is set")
    elif isinstance(optimizer, Muon):
        lines.append(
            "under Muon with update_scale match_adamw AdamW's rate is where to start a search"
        )
    return lines
