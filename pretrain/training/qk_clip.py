"""QK-Clip: after an update, W_Q and W_K of heads whose scores were too large are scaled down.

    largest_h = the largest q·k / √head_dim of head h in the step, over all micro batches and ranks
    γ_h = min(1, τ / largest_h),        W_Qh ← √γ_h W_Qh,  W_Kh ← √γ_h W_Kh

Version-sensitive: DeepSpeed 0.19 casts and gathers the fp32 weights after our optimizer's `step`.

After Kimi K2 (arXiv:2507.20534). Where query heads share a key head, W_Qh ← γ_h W_Qh alone: the key
head's other query heads are not to notice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from pretrain.checkpoint.format import MASTER
from pretrain.checkpoint.slices import slices_of_rank
from pretrain.config.tree import Config
from pretrain.ranks.groups import ParallelContext


class QueryKeyClip:
    """QK-Clip of an engine whose layers have megatron-core's fused W_QKV: a context of each update.

    Our optimizer has moved the fp32 weights, and DeepSpeed has not made the model's of them yet,
    when a hook multiplies them: so the model's follow, rounded once.

    Args:
        engine: a deepspeed.DeepSpeedEngine, not of ZeRO stage 3.
        config: of the run, with optimizer.qk_clip.
        context: this rank's place in the layout.
    """

    def __init__(self, engine: Any, config: Config, context: ParallelContext) -> None:
        self._limit = config.optimizer.qk_clip or math.inf
        self._group = context.mpu.get_data_parallel_group()
        self._shape = config.shape
        heads = self._shape.num_attention_heads // context.tensor_parallel_size
        attentions = [layer.self_attention for layer in engine.module.decoder.layers]
        self._cores = [attention.core_attention for attention in attentions]
        for core in self._cores:
            core.largest = torch.full((heads,), -math.inf, device=context.device)
        names = {id(weight): name for name, weight in engine.module.named_parameters()}
        layers = {names[id(one.linear_qkv.weight)]: n for n, one in enumerate(attentions)}
        own = slices_of_rank(engine)
        self._slices = [(layers[one.name], one) for one in own if one.name in layers]
        self._rows: list[torch.Tensor] | None = None
        engine.basic_optimizer.register_step_post_hook(self._scale)

    def __enter__(self) -> None:
        """Find the factors of all rows (collective). Nothing waits for the device."""
        largest = torch.stack([core.largest for core in self._cores])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        above = (largest > self._limit) & largest.isfinite()
        factors = torch.where(above, self._limit / largest, 1.0)
        self._rows = [self._by_rows(own) for own in factors]

    def __exit__(self, *unused: Any) -> None:
        """Forget the scores of the step."""
        self._rows = None
        for core in self._cores:
            core.largest.fill_(-math.inf)

    @torch.no_grad()
    def _scale(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Multiply the weights that the optimizer has just moved; a factor of 1 changes no bit."""
        if self._rows is None:
            return
        moved = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        refused = 0.0 if optimizer.found_inf is None else optimizer.found_inf
        for layer, one in self._slices:
            if id(one.flat) in moved:
                columns = self._shape.hidden_size
                factors = self._rows[layer].repeat_interleave(columns)
                factors = factors[one.start : one.start + one.length]
                one.values(MASTER).mul_(torch.where(torch.as_tensor(refused) > 0, 1.0, factors))

    def _by_rows(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the factors of the rows of W_QKV, [q … q k v] of each key head."""
        of_groups = factors.view(-1, self._shape.queries_per_group)
        untouched = torch.ones_like(of_groups[:, :1])
        alone = self._shape.queries_per_group == 1
        query = of_groups.sqrt() if alone else of_groups
        parts = (query, query if alone else untouched, untouched)
        return torch.cat(parts, dim=1).flatten().repeat_interleave(self._shape.head_dim)
