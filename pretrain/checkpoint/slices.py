"""The slices of each parameter in this rank's optimizer: of its fp32 master weights and of AdamW's state.

Version-sensitive, and the only file of this package that is: relies on internals of DeepSpeed 0.19's
optimizers. ZeRO-1, ZeRO-2 and BF16_Optimizer cut each group's flattened parameters into one partition a rank
and record a parameter's fragment on this rank in its `_hp_mapping`. ZeRO-3 partitions every parameter by
itself and has the fragment's place in `grad_position`. At stage 0 every rank has everything: in fp32 the
parameters themselves, in bf16 a copy of each in `fp32_groups`. Offsets are never computed by adding up
lengths, because alignment leaves gaps between parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Slice:
    """A slice: elements [start, start + length) of this rank's flattened parameter `name`, as AdamW has them.

    `flat`: the fp32 tensor that AdamW updates; the slice begins there at `offset`. `adam`: AdamW's state of
    `flat`; empty before its first update.
    """

    name: str
    start: int
    length: int
    flat: torch.Tensor
    offset: int
    adam: dict[str, Any]

    @property
    def master(self) -> torch.Tensor:
        """Return a view `[length]` of the master weights."""
        return self.flat.detach().view(-1).narrow(0, self.offset, self.length)

    def moment(self, kind: str) -> torch.Tensor | None:
        """Return a view `[length]` of one of MOMENTS; None before AdamW's first update."""
        return self.adam[kind].view(-1).narrow(0, self.offset, self.length) if self.adam else None

    def begin(self) -> None:
        """Create AdamW's state as its first update would, so that stored values can be copied into it."""
        if not self.adam:
            # A fused AdamW keeps its step count beside its moments, on the device of the weights.
            self.adam["step"] = torch.zeros((), dtype=torch.float32, device=self.flat.device)
            for kind in MOMENTS:
                self.adam[kind] = torch.zeros_like(self.flat)


def slices_of_rank(engine: Any) -> list[Slice]:
    """Return all slices in this rank's optimizer; at ZeRO stage 0 all data-parallel ranks have the same."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        places = _stage_3(engine.module, optimizer)
    elif hasattr(optimizer, "fp32_groups"):
        masters = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
        places = ((parameter, 0, master, 0, master.numel()) for parameter, master in masters)
    elif optimizer is inner:
        places = ((p, 0, p, 0, p.numel()) for group in inner.param_groups for p in group["params"])
    else:
        places = _stages_1_and_2(engine.module, inner)
    return [
        Slice(names[id(parameter)], start, length, flat, offset, inner.state[flat])
        for parameter, start, flat, offset, length in places
    ]


_Place = tuple[torch.nn.Parameter, int, torch.Tensor, int, int]
"""(parameter, offset in it, flat tensor, offset in that, number of elements)."""


def _stages_1_and_2(model: torch.nn.Module, inner: torch.optim.Optimizer) -> Iterator[_Place]:
    for parameter in model.parameters():
        # None: this rank has no fragment of the parameter. DeepSpeed omits parameters without elements.
        mapping = parameter._hp_mapping if parameter.numel() else None  # type: ignore[attr-defined]
        if mapping is not None:
            (flat,) = inner.param_groups[mapping.param_group_index]["params"]
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield parameter, here.start, flat, there.start, there.numel


def _stage_3(model: torch.nn.Module, optimizer: Any) -> Iterator[_Place]:
    for parameter in model.parameters():
        if not parameter.ds_numel:  # type: ignore[attr-defined]
            continue
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start, held = _partition(parameter)
        if held > 0:
            yield parameter, start, optimizer.fp32_partitioned_groups_flat[group], offset, held


def _partition(parameter: Any) -> tuple[int, int]:
    """Return (start, length) of this rank's part under ZeRO-3, without the padding that may follow it."""
    start = parameter.ds_tensor.numel() * dist.get_rank(parameter.ds_process_group)
    return start, max(0, min(parameter.ds_tensor.numel(), parameter.ds_numel - start))


def held_by_rank(parameter: Any) -> torch.Tensor:
    """Return what this rank has of a parameter; under ZeRO-3 without padding, which holds anything."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    return parameter.ds_tensor.detach().narrow(0, 0, _partition(parameter)[1])


def counters_of(engine: Any) -> dict[str, int]:
    return {counter: getattr(engine, counter) for counter in COUNTERS}


def set_counters(engine: Any, counters: Mapping[str, int]) -> None:
    """Set DeepSpeed's counters; micro steps follow from the steps, because the layout may have changed."""
    for counter in COUNTERS:
        setattr(engine, counter, counters[counter])
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
