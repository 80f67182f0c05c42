"""The kernel for structured rows: interpreted, compiled for absent GPUs, and as an operator."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_patches.bank.monarch import Factors, add_input_grad, project
from megatron_patches.bank.monarch_kernel import TILES, Tile, two_products, why_not
from tests.megatron_patches.bank.monarch_kernel_worker import CASES, Case, tensors
from tests.ranks import ROOT, rank_environment

A100_SHARED_BYTES = 163 * 1024
NEAR_ZERO = 2.0**-8
"""Of a row's root mean square: a sum that cancels to less is held to the ulp of that."""
TYPES = (torch.float32, torch.bfloat16)
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None,
    reason="Triton is not installed: `pip install triton` (Linux), or torch with CUDA, brings it",
)


def run_worker(what: str, directory: Path) -> None:
    environment = rank_environment() | {"TRITON_CACHE_DIR": str(directory / "cache")}
    environment |= {"TRITON_INTERPRET": "1"} if what == "interpret" else {}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.megatron_patches.bank.monarch_kernel_worker",
            what,
            str(directory),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def interpreted(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[int, str], list[torch.Tensor]]:
    directory = tmp_path_factory.mktemp("interpreted")
    run_worker("interpret", directory)
    found: dict[tuple[int, str], list[torch.Tensor]] = torch.load(directory / "interpreted.pt")
    return found


def dense(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and input gradient by the dense matrix, in float64."""
    exact = {name: tensor.double() for name, tensor in given.items()}
    rows = Factors(exact["right"], exact["left"]).rows()
    return exact["x"] @ rows.t(), exact["total"] + exact["grad"] @ rows


def both_ways(
    given: dict[str, torch.Tensor], tile: Tile, device: str = "cpu"
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What `two_products` takes for the result and for the input gradient."""
    there = {name: tensor.to(device) for name, tensor in given.items()}
    right, left = there["right"], there["left"]
    forward = (there["x"], right, left, None, [*tile])
    return forward, (there["grad"], left.mT, right.mT, there["total"], [*tile])


def assert_rounded_once(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """fp32: 1e-6 by norm. bf16: everywhere within an ulp of what it is without rounding."""
    assert found.shape == wanted.shape and found.is_contiguous()
    if found.dtype == torch.float32:
        assert (found.double() - wanted).norm() <= 1e-6 * wanted.norm()
        return
    size = torch.maximum(wanted.abs(), NEAR_ZERO * wanted.square().mean(dim=1, keepdim=True).sqrt())
    ulp = 2.0 ** (size.log2().floor() - 7)
    assert ((found.double() - wanted).abs() <= ulp).all()


@needs_triton
@pytest.mark.distributed
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_kernel_gives_the_dense_product_rounded_once(
    number: int, dtype: torch.dtype, interpreted: dict[tuple[int, str], list[torch.Tensor]]
) -> None:
    found = interpreted[number, str(dtype)]
    for one, wanted in zip(found, dense(tensors(CASES[number], dtype)), strict=True):
        assert_rounded_once(one, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_too(case: Case, dtype: torch.dtype, tile: Tile) -> None:
    given = tensors(case, dtype)
    for arguments, wanted in zip(both_ways(given, tile, "cuda"), dense(given), strict=True):
        assert_rounded_once(two_products(*arguments).cpu(), wanted)


@needs_triton
@pytest.mark.distributed
def test_the_kernel_compiles_for_gpus_and_fits(tmp_path: Path) -> None:
    """The interpreter takes Python that the compiler refuses; sizes are those of d 2048."""
    run_worker("compile", tmp_path)
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert len(compiled) == 4
    for found in compiled:
        assert found["machine_code"] > 0 and found["shared_bytes"] <= A100_SHARED_BYTES, found
        assert found["wide_stores"] > 0, found
        # No tensor core multiplies fp32; TF32 would be another result.
        assert (found["tensor_core_products"] > 0) == (found["type"] == "bf16"), found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator_on_the_cpu_gives_the_dense_product_rounded_once(
    case: Case, dtype: torch.dtype
) -> None:
    given = tensors(case, dtype)
    for arguments, wanted in zip(both_ways(given, Tile()), dense(given), strict=True):
        assert_rounded_once(two_products(*arguments), wanted)


def test_the_operator_keeps_the_rules_of_torch_library() -> None:
    """The result, and the input gradient, which has an addend."""
    for arguments in both_ways(tensors(CASES[1], torch.float32), Tile()):
        torch.library.opcheck(two_products, arguments)


def test_projections_with_a_tile_are_those_without_and_compile_whole() -> None:
    case = Case(tokens=12, a=8, b=12, m=10)
    given = tensors(case, torch.float32)
    factors = Factors(given["right"], given["left"])
    x = given["x"].unflatten(0, (4, 3))
    grad = given["grad"].unflatten(0, (4, 3))
    wanted = project(x, factors)
    torch.testing.assert_close(project(x, factors, Tile()), wanted)
    compiled = torch.compile(
        lambda x: 2 * project(x, factors, Tile()),
        backend="aot_eager",
        fullgraph=True,
        dynamic=False,
    )
    torch.testing.assert_close(compiled(x), 2 * wanted)
    total = given["total"]
    torch.testing.assert_close(
        add_input_grad(grad, factors, total, Tile()), add_input_grad(grad, factors, total.clone())
    )


def test_the_kernel_is_never_for_the_cpu() -> None:
    assert why_not(torch.empty(8, 4, 8)) == "it is for CUDA, and this is the CPU"


@needs_triton
def test_the_kernel_takes_blocks_of_128_on_cuda() -> None:
    """Judge by tensors that only say that they are there."""
    with FakeTensorMode():
        fits, deep, wide = (
            torch.empty(size, device="cuda") for size in ((128, 2, 128), (129, 2, 8), (8, 2, 129))
        )
        assert why_not(fits) is None
        assert why_not(deep) == "blocks of 129 and 8 are larger than 128"
        assert why_not(wide) == "blocks of 8 and 129 are larger than 128"
