"""`python -m megatron_patches digest` as a user runs it."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from megatron_patches.__main__ import app

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 16 --num-query-groups 8"
LINE = re.compile(
    r"layer=(\d+) role=(query|key) head=(\d+) sha256=([0-9a-f]{64}) err=(\d\.\de[+-]\d\d)"
)


def digest(options: str) -> str:
    result = CliRunner().invoke(app, f"digest {MODEL} {options}")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_text_is_the_same_for_every_tensor_parallel_size() -> None:
    texts = {digest(f"--tensor-parallel-size {size}") for size in (1, 2, 4, 8)}
    assert len(texts) == 1
    lines = [LINE.fullmatch(line) for line in texts.pop().splitlines()]
    assert all(lines)
    records = [line.groups() for line in lines if line]
    heads = {"query": 16, "key": 8}
    places = [
        (str(n), role, str(head)) for n in range(2) for role in heads for head in range(heads[role])
    ]
    assert [(layer, role, head) for layer, role, head, _, _ in records] == places
    assert len({sha256 for _, _, _, sha256, _ in records}) == len(records)
    assert max(float(error) for *_, error in records) <= 1e-6


def test_every_option_changes_the_bank() -> None:
    changes = ["", "--seed 1235", "--construction svd", "--dtype bf16", "--head-dim 2"]
    changes.append("--head-dim 4 --scope layer")
    assert len({digest(change).splitlines()[0] for change in changes}) == len(changes)


@pytest.mark.distributed
def test_as_a_module_it_prints_the_same_text() -> None:
    command = [sys.executable, "-m", "megatron_patches", "digest", *MODEL.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == digest("--seed 1234 --construction qr --scope head --dtype fp32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--tensor-parallel-size 3",
            "num_query_groups=8 is not divisible by tensor_model_parallel_size=3",
        ),
        ("--tensor-parallel-size 0", "tensor_parallel_size=0"),
        ("--head-dim 65", "head_dim=65 is larger than hidden_size=64"),
        ("--hidden-size 60", "hidden_size=60 is not divisible by num_attention_heads=16"),
        ("--num-layers 0", "num_layers=0"),
        ("--dtype fp8", "dtype is 'fp8'; known: fp32, bf16, fp64"),
        ("--construction lu", "construction is 'lu'"),
    ],
)
def test_errors_are_one_sentence(options: str, message: str) -> None:
    result = CliRunner().invoke(app, f"digest {MODEL} {options}")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
