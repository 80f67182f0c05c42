"""Command line of the method.

`python -m megatron_patches digest` prints the digests of a frozen bank, a line per head.
"""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    print(
        f"error: {sys.executable} has no typer; `make demo` installs what is needed into .venv, "
        "then `source .venv/bin/activate`",
        file=sys.stderr,
    )
    sys.exit(2)

from megatron_patches.bank.orthonormal import CONSTRUCTIONS, ROLES, SCOPES, BankRecipe
from megatron_patches.errors import MethodError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def main() -> None:
    """The frozen Query/Key bank of Orthogonal Random Attention."""


@app.command()
def digest(
    num_layers: Annotated[int, typer.Option(help="Layers of the model.")],
    hidden_size: Annotated[int, typer.Option(help="Width of the model.")],
    num_attention_heads: Annotated[int, typer.Option(help="Query heads per layer.")],
    num_query_groups: Annotated[
        int | None, typer.Option(help="Key heads (default: num-attention-heads).")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Rows per head (default: hidden-size / num-attention-heads).")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks whose shards are built.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the bank.")] = 1234,
    construction: Annotated[str, typer.Option(help=", ".join(CONSTRUCTIONS))] = "qr",
    scope: Annotated[str, typer.Option(help=", ".join(SCOPES))] = "head",
    dtype: Annotated[
        str, typer.Option(help=f"What the rows are cast to: {', '.join(DTYPES)}.")
    ] = "fp32",
) -> None:
    """Print the SHA-256 and the worst |W Wᵀ − I| of every frozen head, made as training makes them.

    The text is the same for every tensor-parallel size and, with construction qr, on every machine.

    Example: python -m megatron_patches digest --num-layers 12 --hidden-size 768
    --num-attention-heads 12
    """
    try:
        if head_dim is None:
            head_dim = _default_head_dim(hidden_size, num_attention_heads)
        recipe = BankRecipe(
            seed=seed,
            hidden_size=hidden_size,
            head_dim=head_dim,
            num_attention_heads=num_attention_heads,
            num_query_groups=num_attention_heads if num_query_groups is None else num_query_groups,
            scope=scope,
            construction=construction,
        )
        _print_digests(recipe, num_layers, tensor_parallel_size, dtype)
    except MethodError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _default_head_dim(hidden_size: int, num_attention_heads: int) -> int:
    if num_attention_heads < 1 or hidden_size % num_attention_heads:
        raise MethodError(
            f"hidden_size={hidden_size} is not divisible by "
            f"num_attention_heads={num_attention_heads}; give --head-dim"
        )
    return hidden_size // num_attention_heads


def _print_digests(
    recipe: BankRecipe, num_layers: int, tensor_parallel_size: int, dtype: str
) -> None:
    if num_layers < 1:
        raise MethodError(f"num_layers={num_layers} must be at least 1")
    if tensor_parallel_size < 1:
        raise MethodError(f"tensor_parallel_size={tensor_parallel_size} must be at least 1")
    if dtype not in DTYPES:
        raise MethodError(f"dtype is '{dtype}'; known: {', '.join(DTYPES)}")
    # torch is heavy: --help and the errors above should be quick.
    import torch

    from megatron_patches.bank import shards

    for layer in range(num_layers):
        for role in ROLES:
            head = 0
            for rank in range(tensor_parallel_size):
                shard = shards.layer_shard(
                    recipe,
                    layer,
                    role=role,
                    rank=rank,
                    tensor_parallel_size=tensor_parallel_size,
                    dtype=getattr(torch, DTYPES[dtype]),
                )
                hashes = shards.head_digests(shard, recipe.head_dim)
                errors = shards.orthonormality_errors(shard, recipe.head_dim)
                for sha256, error in zip(hashes, errors, strict=True):
                    typer.echo(
                        f"layer={layer} role={role} head={head} sha256={sha256} err={error:.1e}"
                    )
                    head += 1


if __name__ == "__main__":
    app(prog_name="python -m megatron_patches")
