"""The slices of each parameter in this rank's optimizer: fp32 master weights and optimizer states.

Version-sensitive, as the only file of this package: relies on internals of DeepSpeed 0.19's
optimizers. ZeRO-1, ZeRO-2 and BF16_Optimizer cut each group's flattened parameters into one
partition per rank and record a parameter's fragment on this rank in its `_hp_mapping`. ZeRO-3
partitions every parameter separately and keeps the fragment's position in `grad_position`. At stage
0 every rank holds everything: in fp32 the parameters themselves, in bf16 a copy of each in
`fp32_groups`. Offsets are never computed by adding up lengths, because alignment leaves gaps
between parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.engine.freeze import kept_weights
from pretrain.checkpoint.format import MASTER, Counters

STEP = "step"
"""Key of the count of updates in the state of an optimizer that counts them, as AdamW does."""


@dataclass(frozen=True)
class Slice:
    """Elements [start, start + length) of this rank's flattened parameter, in its optimizer.

    Attributes:
        name: Name of the parameter in the live model.
        flat: The fp32 tensor that the optimizer updates; the slice starts there at `offset`.
        states: Kinds of values that the optimizer keeps of each element beside the master weight.
        state: The optimizer's state of `flat`.
    """

    name: str
    start: int
    length: int
    flat: torch.Tensor
    offset: int
    states: tuple[str, ...]
    state: dict[str, Any]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of values that a checkpoint holds of the slice."""
        return (MASTER, *self.states)

    @property
    def step(self) -> torch.Tensor | None:
        """Return the count of updates, shared by all of `flat`; None for a state without one."""
        return self.state.get(STEP)

    def values(self, kind: str) -> torch.Tensor:
        """Return a view `[length]` of the values of one of `kinds`."""
        flat = self.flat.detach() if kind == MASTER else self.state[kind]
        return flat.view(-1).narrow(0, self.offset, self.length)


def slices_of_rank(engine: Any) -> list[Slice]:
    """Return all slices in this rank's optimizer.

    At ZeRO stage 0 all data-parallel ranks hold the same slices. States that do not exist yet are
    created as the first update would create them.
    """
    inner = engine.basic_optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    slices = []
    for parameter, start, flat, offset, length in _places(engine):
        inner.begin(flat)
        slices.append(
            Slice(
                name=names[id(parameter)],
                start=start,
                length=length,
                flat=flat,
                offset=offset,
                states=inner.states_of(flat),
                state=inner.state[flat],
            )
        )
    return slices


def kept_slices(model: torch.nn.Module) -> list[Slice]:
    """Return the rows that are frozen as they were trained, whole and without states.

    No optimizer holds these rows: every data-parallel rank has all of them, in the model's type.
    """
    return [
        Slice(name, 0, tensor.numel(), flat=tensor, offset=0, states=(), state={})
        for name, tensor in kept_weights(model)
    ]


_Place = tuple[torch.nn.Parameter, int, torch.Tensor, int, int]
"""(parameter, offset in it, flat tensor, offset in that, number of elements)."""


def _places(engine: Any) -> Iterator[_Place]:
    optimizer, inner = engine.optimizer, engine.basic_optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _stage_3(engine.module, optimizer)
    if hasattr(optimizer, "fp32_groups"):
        masters = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
        return ((parameter, 0, master, 0, master.numel()) for parameter, master in masters)
    if optimizer is inner:
        parameters = (parameter for group in inner.param_groups for parameter in group["params"])
        return ((parameter, 0, parameter, 0, parameter.numel()) for parameter in parameters)
    return _stages_1_and_2(engine.module, inner)


def _stages_1_and_2(model: torch.nn.Module, inner: torch.optim.Optimizer) -> Iterator[_Place]:
    for parameter in model.parameters():
        # None: this rank holds no fragment of the parameter. DeepSpeed leaves the attribute out of
        # parameters without elements.
        mapping = parameter._hp_mapping if parameter.numel() else None  # type: ignore[attr-defined]
        if mapping is not None:
            (flat,) = inner.param_groups[mapping.param_group_index]["params"]
            fragment, master_fragment = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield parameter, fragment.start, flat, master_fragment.start, master_fragment.numel


def _stage_3(model: torch.nn.Module, optimizer: Any) -> Iterator[_Place]:
    for parameter in model.parameters():
        if not parameter.ds_numel:  # type: ignore[attr-defined]
            continue
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start, length = _partition(parameter)
        if length > 0:
            yield parameter, start, optimizer.fp32_partitioned_groups_flat[group], offset, length


def _partition(parameter: Any) -> tuple[int, int]:
    """Return (start, length) of this rank's part under ZeRO-3, without its padding."""
    start = parameter.ds_tensor.numel() * dist.get_rank(parameter.ds_process_group)
    return start, max(0, min(parameter.ds_tensor.numel(), parameter.ds_numel - start))


def held_by_rank(parameter: Any) -> torch.Tensor:
    """Return this rank's part of a parameter, without the padding of ZeRO-3."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    return parameter.ds_tensor.detach().narrow(0, 0, _partition(parameter)[1])


def counters_of(engine: Any) -> Counters:
    """Return DeepSpeed's counters of an engine."""
    return Counters(
        global_steps=engine.global_steps,
        global_samples=engine.global_samples,
        micro_steps=engine.micro_steps,
        skipped_steps=engine.skipped_steps,
    )


def set_counters(engine: Any, counters: Counters) -> None:
    """Set DeepSpeed's counters of an engine.

    Micro steps are computed from the steps, because the layout may have changed.

    Args:
        engine: A deepspeed.DeepSpeedEngine.
        counters: Counters from `counters_of`.
    """
    for counter, count in counters.items():
        setattr(engine, counter, count)
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
