"""The rates of one card: products, attention and memory traffic; a stage of `make gpu-check`.

    python -m benchmarks.gpu.card --json rates.json --card card.json

The second file is a card as `pretrain plan --gpu FILE` reads it. What one GPU cannot tell
(collectives, GPUs of a node) is taken from the known card of nearest name, and `notes` in the first
file says so.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.measurements import Measurements, measuring_parser
from pretrain.model.structured_products import take_turns
from pretrain.plan.cards import GPUS, Gpu
from pretrain.plan.duration import FLASH_BACKWARD
from pretrain.ranks.devices import peak_flops
from pretrain.ranks.gpu_settings import use_arithmetic
from pretrain.runs.directory import write_json

TERA = 1e12
HEADS, HEAD_DIM = 16, 64


def main() -> None:
    """Measure the rates, and write the card if one is asked for."""
    parser = measuring_parser(__doc__)
    parser.add_argument("--card", type=Path, help="write the card too; only on a GPU")
    arguments = parser.parse_args()
    use_arithmetic(deterministic=False, reduced_precision_reduction=False)
    measured = Measurements(arguments.json, arguments.seconds, facts=facts(), rates={})
    for name, measure in MEASUREMENTS.items():
        measured.attempt(name, measure, "rates")
    if arguments.card and torch.cuda.is_available():
        card, notes = card_of(measured.values["rates"], measured.values["facts"])
        write_json(arguments.card, card.model_dump())
        measured.values |= {"card": card.model_dump(), "notes": notes}
        measured.write()


def facts() -> dict[str, Any]:
    """Return the names of the card and of its software."""
    if not torch.cuda.is_available():
        return {"name": "CPU", "torch": torch.__version__, "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "fp32 products": torch.get_float32_matmul_precision(),
        **_driver_facts(),
    }


def _driver_facts() -> dict[str, str]:
    fields = (
        "driver_version",
        "power.limit",
        "clocks.max.sm",
        "clocks.max.mem",
        "mig.mode.current",
    )
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.partition("\n")[0].split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def products() -> float:
    """TFLOP/s over the bf16 products of one layer of `large` and its logits, forward."""
    tokens, d, vocabulary = _sizes()
    pairs = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d), (d, vocabulary)]
    return _rate([_product(tokens, inner, outer) for inner, outer in pairs])


def weight_gradients() -> float:
    """TFLOP/s of the products that make the gradients of those weights."""
    tokens, d, vocabulary = _sizes()
    pairs = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d), (vocabulary, d)]
    return _rate([_weight_gradient(tokens, rows, columns) for rows, columns in pairs])


def fp32_products() -> float:
    """TFLOP/s of fp32 products, no TF32."""
    tokens, d, _ = _sizes()
    return _rate([_product(tokens, d, 4 * d, torch.float32)])


def attention() -> dict[str, float]:
    """Return TFLOP/s of causal flash attention, both passes, by length; the causal half counts."""
    on_gpu = torch.cuda.is_available()
    lengths, tokens = ((512, 2048, 8192), 16384) if on_gpu else ((64, 128), 256)
    return {str(length): _attention(length, tokens // length) for length in lengths}


def elementwise() -> float:
    """TB/s of an addition that reads two tensors and writes one, in bf16."""
    one, other, sums = (_random(2**28 if torch.cuda.is_available() else 2**20) for _ in range(3))
    return (
        3
        * one.numel()
        * one.element_size()
        / _seconds(lambda: torch.add(one, other, out=sums))
        / TERA
    )


MEASUREMENTS: dict[str, Callable[[], Any]] = {
    "gemm_tflops": products,
    "weight_gradient_tflops": weight_gradients,
    "bandwidth_tb_s": elementwise,
    "attention_tflops_by_length": attention,
    "fp32_tflops": fp32_products,
}


def card_of(rates: dict[str, Any], facts: dict[str, Any]) -> tuple[Gpu, list[str]]:
    """Return the card for `pretrain plan`, and what of it was not measured.

    Args:
        rates: by the names of MEASUREMENTS, those that were measured.
        facts: as `facts` returns them.

    Returns:
        The card, and a sentence for each number that is that of another one.
    """
    name = facts["name"]
    near = next(
        (card for key, card in GPUS.items() if key.split("-")[0] in name.lower()), GPUS["h100-80gb"]
    )
    peak = peak_flops(name)
    values = near.model_dump() | {
        "name": name.lower().replace(" ", "-")[:60],
        "memory_gb": facts["memory_bytes"] / 1e9,
        "peak_tflops": near.peak_tflops if peak is None else peak / TERA,
    }
    measured = ("gemm_tflops", "weight_gradient_tflops", "fp32_tflops", "bandwidth_tb_s")
    values |= {key: float(f"{rates[key]:.4g}") for key in measured if key in rates}
    notes = [f"{key} is that of {near.name}: not measured" for key in measured if key not in rates]
    notes.append(
        f"node_gb_s, network_gb_s and gpus_per_node are those of {near.name}: one GPU cannot tell"
    )
    if "attention_tflops_by_length" in rates:
        by_length = {
            int(length): rate for length, rate in rates["attention_tflops_by_length"].items()
        }
        most, half = attention_curve(by_length)
        values |= {
            "attention_tflops": float(f"{most:.4g}"),
            "attention_half_length": float(f"{half:.4g}"),
        }
    try:
        values["watts"] = float(facts["power.limit"])
    except (KeyError, ValueError):
        notes.append(f"watts is that of {near.name}: the driver does not say")
    return Gpu.model_validate(values), notes


def attention_curve(rates: dict[int, float]) -> tuple[float, float]:
    """Return most and half of `most * length / (length + half)` through shortest and longest."""
    short = min(rates)
    long = max(rates)
    slope = (1 / rates[short] - 1 / rates[long]) / (1 / short - 1 / long)
    most = 1 / max(1 / rates[long] - slope / long, 1e-9)
    return most, max(0.0, slope * most)


Work = tuple[Callable[[], object], float]
"""What is timed, and its FLOPs."""


def _product(tokens: int, inner: int, outer: int, dtype: torch.dtype = torch.bfloat16) -> Work:
    x = _random(tokens, inner, dtype=dtype)
    weight = _random(outer, inner, dtype=dtype)
    return lambda: torch.nn.functional.linear(x, weight), 2.0 * tokens * inner * outer


def _weight_gradient(tokens: int, rows: int, columns: int) -> Work:
    gradient = _random(tokens, rows)
    x = _random(tokens, columns)
    return lambda: gradient.t().matmul(x), 2.0 * tokens * rows * columns


def _attention(length: int, batch: int) -> float:
    heads = [_random(batch, HEADS, length, HEAD_DIM).requires_grad_() for _ in range(3)]
    gradient = _random(batch, HEADS, length, HEAD_DIM)

    def both_ways() -> None:
        scaled_dot_product_attention(*heads, is_causal=True).backward(gradient)

    forward = 2 * 2.0 * batch * HEADS * length * length * HEAD_DIM / 2
    return _rate([(both_ways, forward * (1 + FLASH_BACKWARD))])


def _rate(work: Sequence[Work]) -> float:
    return sum(flops for _, flops in work) / sum(_seconds(run) for run, _ in work) / TERA


def _seconds(work: Callable[[], object]) -> float:
    return take_turns({"": work}, torch.device(_device()))[""] / 1e3


def _random(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*sizes, device=_device(), dtype=dtype)


def _sizes() -> tuple[int, int, int]:
    """Return tokens of a micro batch, hidden size and vocabulary: of `large`, or small on a CPU."""
    return (25 * 512, 1024, 32000) if torch.cuda.is_available() else (64, 64, 512)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
