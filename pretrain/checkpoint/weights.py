"""The weights in a checkpoint, of any layout, without an engine and without process groups.

for name, weight in full_weights(Path("runs/NAME/checkpoints/step_00000123")):
    ...    # fp32, on the CPU, one at a time
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from pretrain.checkpoint.reading import StoredCheckpoint
from pretrain.checkpoint.state import StoredState


def full_weights(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, fp32 master weight) of every trained parameter, by name.

    Frozen Query/Key rows are not among them: they are regenerated. The trainable heads beside a frozen bank
    are two, `….trained_query` and `….trained_key`, `[heads * head_dim, hidden]` in the order of the heads.

    Raises:
        UserError: it is of another format, or damaged.
    """
    stored = StoredCheckpoint(checkpoint)
    for name in sorted(stored.parameters):
        yield name, stored.full("master", name)


def load_weights(checkpoint: Path, model: torch.nn.Module) -> None:
    """Put the weights of `checkpoint` into a model built without parallelism, in the model's precision.

    Every parameter of the model must be there, and nothing else; buffers, such as a frozen bank, are left
    alone.

    Raises:
        UserError: the checkpoint is of another model, of another format, or damaged.
    """
    StoredState(StoredCheckpoint(checkpoint), rank=0, size=1).give_weights(model)
