"""The parallel layout that wrote a checkpoint. A resume may use another one; the differences are reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pretrain.config.deepspeed import zero_stage
from pretrain.config.keys import Change
from pretrain.config.tree import Config
from pretrain.ranks.groups import ParallelContext


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a run, which does not change the trained weights, up to rounding.

    `dtype`: of the computation; recorded only, because a resume refuses another one (see `identity`).
    """

    world_size: int
    tensor_model_parallel_size: int
    data_parallel_size: int
    sequence_parallel: bool
    zero_stage: int
    micro_batch_size: int
    dtype: str

    @classmethod
    def of(cls, config: Config, context: ParallelContext) -> Layout:
        return cls(
            world_size=context.world_size,
            tensor_model_parallel_size=context.tensor_parallel_size,
            data_parallel_size=context.data_parallel_size,
            sequence_parallel=config.parallel.sequence_parallel,
            zero_stage=zero_stage(config, context.world_size),
            micro_batch_size=config.data.micro_batch_size,
            dtype=config.precision.dtype,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def changes_from(self, earlier: Mapping[str, Any]) -> list[Change]:
        """Return the differences from an earlier layout, given as `as_dict` returns it."""
        return [
            Change(key, earlier[key], value)
            for key, value in self.as_dict().items()
            if key in earlier and earlier[key] != value
        ]


_NAMES = {
    "world_size": "ranks",
    "tensor_model_parallel_size": "TP",
    "data_parallel_size": "DP",
    "sequence_parallel": "sequence parallel",
    "zero_stage": "ZeRO",
    "micro_batch_size": "micro batch",
}


def layout_line(changes: list[Change], dropout: float) -> str:
    """Return one line that names the changes of the layout, and their consequence."""
    differences = ", ".join(
        f"{_NAMES.get(change.key, change.key)} {_word(change.was)} -> {_word(change.value)}"
        for change in changes
    )
    line = f"resuming at another layout: {differences}"
    if dropout > 0 and any(change.key == "tensor_model_parallel_size" for change in changes):
        line += "; with dropout > 0 and another TP size the masks differ from the uninterrupted run's"
    return line


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
