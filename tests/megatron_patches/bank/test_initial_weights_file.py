"""The file of initial weights: rows in any order, heads by their digests, damaged files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_patches.bank.initial_weights_file import FORMAT, GivenWeights, bank_name, head_digest
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.bank.shards import bank_rows
from megatron_patches.errors import MethodError

HEADS, HEAD_DIM, HIDDEN = {"query": 4, "key": 2}, 3, 8


def write(path: Path, format: str = FORMAT, digests: int = 4) -> dict[str, torch.Tensor]:
    """A file of one layer, of each role with so many digests at most."""
    generator = torch.Generator().manual_seed(0)
    rows = {
        bank_name(0, role): torch.randn(count * HEAD_DIM, HIDDEN, generator=generator).half()
        for role, count in HEADS.items()
    }
    heads = {
        name: [head_digest(head) for head in values.split(HEAD_DIM)][:digests]
        for name, values in rows.items()
    }
    stated = {"model": json.dumps({"hidden_size": HIDDEN}), "heads": json.dumps(heads)}
    save_file(rows, path, {"format": format, **stated})
    return rows


def test_rows_and_heads_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    rows = write(path)
    weights_file = GivenWeights(path)
    name = bank_name(0, "query")
    assert name == "layer.0.attention.query" and weights_file.model == {"hidden_size": HIDDEN}
    assert weights_file.has(name) and not weights_file.has(bank_name(1, "query"))
    for numbers in ([0], [5, 6, 7, 2, 3, 0, 0, 11], range(12), []):
        read_rows = weights_file.rows(name, numbers)
        assert read_rows.dtype == torch.float16 and torch.equal(
            read_rows, rows[name][list(numbers)]
        )
    recipe = BankRecipe(
        0,
        HIDDEN,
        head_dim=HEAD_DIM,
        num_attention_heads=4,
        num_query_groups=2,
        init="pretrained",
        given_sha256="x",
        given_path=str(path),
    )
    for role, count in HEADS.items():
        by_head = rows[bank_name(0, role)].float().split(HEAD_DIM)
        for head in range(count):
            assert torch.equal(weights_file.head(0, role, head, HEAD_DIM), by_head[head])
        order = list(reversed(range(count)))
        drawn = bank_rows(recipe, 0, role, order)  # type: ignore[arg-type]
        assert torch.equal(
            torch.from_numpy(drawn), torch.cat([by_head[head] for head in order]).double()
        )
        assert bank_rows(recipe, 0, role, []).shape == (0, HIDDEN)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="query head=4 does not exist"):
        bank_rows(recipe, 0, "query", [4])
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert weights_file.sha256 == hashlib.sha256(content[8 : 8 + size]).hexdigest()


def test_a_head_of_another_digest_or_of_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of the last head of one of both
    path.write_bytes(content)
    refused = 0
    for role, count in HEADS.items():
        for head in range(count):
            try:
                GivenWeights(path).head(0, role, head, HEAD_DIM)
            except MethodError as error:
                refused += 1
                assert f"head {head} of layer.0.attention.{role} does not have the SHA-256" in str(
                    error
                )
                assert head == count - 1
    assert refused == 1
    write(path, digests=1)
    assert GivenWeights(path).head(0, "key", 0, HEAD_DIM).shape == (HEAD_DIM, HIDDEN)
    with pytest.raises(
        MethodError, match=r"head 1 of layer\.0\.attention\.key does not have the SHA-256"
    ):
        GivenWeights(path).head(0, "key", 1, HEAD_DIM)
    with pytest.raises(
        MethodError, match=r"cannot be used: layer\.1\.attention\.key: .*; restore the file"
    ):
        GivenWeights(path).head(1, "key", 0, HEAD_DIM)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content[:5], "it is not a safetensors file"),
        (lambda content: content[:50], "it is not a safetensors file"),
        (
            lambda content: (100_000_001).to_bytes(8, "little") + content[8:],
            "it is not a safetensors file",
        ),
        (lambda content: (2).to_bytes(8, "little") + b"[]", "its header cannot be read"),
        (
            lambda content: (2).to_bytes(8, "little") + b"{}",
            "`python -m pretrain import` did not make it",
        ),
    ],
)
def test_what_is_no_such_file_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], problem: str
) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(
        MethodError, match="cannot be used: No such file or directory; restore the file"
    ):
        _ = GivenWeights(path).sha256
    write(path, format="another")
    with pytest.raises(MethodError, match="`python -m pretrain import` did not make it"):
        _ = GivenWeights(path).model
    write(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(MethodError, match=f"weights.safetensors cannot be used: {problem}"):
        _ = GivenWeights(path).model
