"""The full weights in a checkpoint, whatever layout wrote it: ZeRO shards gathered, tensor-parallel shards
merged.

Version-sensitive: leans on DeepSpeed 0.19's file names, and on its own `zero_to_fp32` for ZeRO-3.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron_patches.attention import FrozenQueryKeyValueLinear
from megatron_patches.orthonormal import ROLES
from megatron_patches.shards import split_heads
from pretrain.errors import UserError
from pretrain.ranks.groups import import_deepspeed

_WHOLE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_ZERO3 = re.compile(r"(?:\w+_)?zero_pp_rank_\d+_mp_rank_(\d+)_(model|optim)_states\.pt")

_REMEDY = "restore the run's own config.yaml"

Weights = Mapping[str, torch.Tensor]


def load_weights(checkpoint: Path, model: torch.nn.Module) -> None:
    """Put the weights of `checkpoint`, trained under any layout, into a model built without parallelism.

    Every parameter of the model must be there; nothing else is touched (the frozen bank is not in
    checkpoints). Files are unpickled: only open runs you trust, as for a resume.

    Raises:
        UserError: the checkpoint's files are not those of one model of this shape.
    """
    shards = rank_weights(checkpoint)
    parameters = dict(model.named_parameters())
    unknown = sorted(set().union(*shards) - parameters.keys())
    if unknown:
        raise UserError(f"{checkpoint} has a weight '{unknown[0]}' that this model has not; {_REMEDY}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_merged(model, name, parameter, shards, checkpoint))


def _merged(
    model: torch.nn.Module, name: str, full: torch.Tensor, shards: Sequence[Weights], checkpoint: Path
) -> torch.Tensor:
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, FrozenQueryKeyValueLinear) and full is owner.trained_query_key:
        return _trained_heads(name, owner, shards, checkpoint)
    parts = [shard[name] for shard in shards if name in shard]
    if len(parts) != len(shards):
        raise UserError(f"{checkpoint} has no weight '{name}'; {_REMEDY}")
    return merge(name, parts, full, checkpoint)


def _trained_heads(
    name: str, owner: FrozenQueryKeyValueLinear, shards: Sequence[Weights], checkpoint: Path
) -> torch.Tensor:
    """The trainable heads beside a bank: a rank has its queries, then its keys, or nothing if it has none."""
    recipe, full = owner.recipe, owner.trained_query_key
    assert full is not None
    roles: dict[str, list[torch.Tensor]] = {"query": [], "key": []}
    for rank, shard in enumerate(shards):
        heads = split_heads(
            recipe.num_attention_heads, recipe.num_query_groups, owner.frozen_groups, rank, len(shards)
        ).trainable
        rows = [len(heads[role]) * recipe.head_dim for role in ROLES]
        part = shard.get(name, full[:0])
        if len(part) != sum(rows):
            raise UserError(f"{checkpoint}: rank {rank} has {len(part)} rows of '{name}', not {sum(rows)}")
        for role, piece in zip(ROLES, part.split(rows), strict=True):
            roles[role].append(piece)
    return torch.cat([piece for pieces in roles.values() for piece in pieces])


def merge(name: str, parts: Sequence[torch.Tensor], full: torch.Tensor, checkpoint: Path) -> torch.Tensor:
    """One weight from its tensor-parallel shards, in rank order.

    `full` is the parameter of the unsharded model: its `tensor_model_parallel` and `partition_dim` marks say
    how it is cut; without them every rank holds the same copy.

    Raises:
        UserError: the shards do not make a weight of that shape, or the copies differ.
    """
    if getattr(full, "tensor_model_parallel", False):
        merged = torch.cat(list(parts), dim=full.partition_dim)  # type: ignore[attr-defined]
    else:
        merged = parts[0]
        if not all(torch.equal(merged, part) for part in parts[1:]):
            raise UserError(f"{checkpoint}: '{name}' differs between tensor-parallel ranks; it is damaged")
    if merged.shape != full.shape:
        raise UserError(
            f"{checkpoint} has '{name}' in shape {tuple(merged.shape)} but config.yaml describes "
            f"{tuple(full.shape)}; {_REMEDY}"
        )
    return merged


def rank_weights(checkpoint: Path) -> list[Weights]:
    """{name: this rank's shard} for every tensor-parallel rank, ZeRO's partitions gathered.

    Raises:
        UserError: the files are of no layout this program writes.
    """
    names = [file.name for file in checkpoint.iterdir()]
    whole = {int(match[1]): match[0] for match in map(_WHOLE.fullmatch, names) if match}
    if whole:  # ZeRO stages 0 to 2 keep the module's weights whole on every rank
        _require_all_ranks(checkpoint, whole)
        return [_module(checkpoint / whole[rank]) for rank in sorted(whole)]
    partitions: dict[int, list[str]] = defaultdict(list)
    for match in map(_ZERO3.fullmatch, names):
        if match:
            partitions[int(match[1])].append(match[0])
    _require_all_ranks(checkpoint, partitions)
    return [_gathered(checkpoint, partitions[rank]) for rank in sorted(partitions)]


def _require_all_ranks(checkpoint: Path, found: Mapping[int, object]) -> None:
    if not found or sorted(found) != list(range(len(found))):
        raise UserError(f"{checkpoint} does not hold the weights of every tensor-parallel rank; restore it")


def _module(file: Path) -> Weights:
    weights = torch.load(file, map_location="cpu", weights_only=False)["module"]
    return {name: tensor for name, tensor in weights.items() if torch.is_tensor(tensor)}


def _gathered(checkpoint: Path, files: Sequence[str]) -> Weights:
    """One tensor-parallel rank's weights from its ZeRO-3 partitions, float32.

    DeepSpeed's tool takes all files of a directory for one model, so it is shown one rank's at a time.
    """
    import_deepspeed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with tempfile.TemporaryDirectory() as directory:
        for name in files:
            (Path(directory) / "rank").mkdir(exist_ok=True)
            (Path(directory) / "rank" / name).symlink_to((checkpoint / name).resolve())
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                return get_fp32_state_dict_from_zero_checkpoint(directory, tag="rank")
        except (ValueError, KeyError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{checkpoint}: DeepSpeed cannot gather its ZeRO-3 shards ({reason})") from error
