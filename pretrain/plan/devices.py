"""The cards, and what is assumed of each: every number of a card is an assumption until it is measured there.

A user's own card is a YAML or JSON file with the fields of `Gpu`.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from pydantic import Field, ValidationError

from pretrain.config.counting import PEAK_BF16_TFLOPS
from pretrain.config.sources import is_file, read_yaml
from pretrain.config.types import Number, Section
from pretrain.errors import UserError

_PEAK = dict(PEAK_BF16_TFLOPS)


class Gpu(Section):
    """One card, and the cluster around it. Rates are those that programs reach, not a data sheet's."""

    name: str = Field(min_length=1, max_length=60, description="What it is called in the output.")
    memory_gb: Number = Field(gt=0, description="Memory that torch reports, in 1e9 bytes.")
    peak_tflops: Number = Field(gt=0, description="The data sheet's dense bf16 rate, for MFU and HFU.")
    gemm_tflops: Number = Field(gt=0, description="bf16 products of forward and of input gradients.")
    weight_gradient_tflops: Number = Field(gt=0, description="bf16 products of weight gradients.")
    fp32_tflops: Number = Field(gt=0, description="Products in fp32, without TF32.")
    attention_tflops: Number = Field(gt=0, description="Flash attention over long samples, causal half.")
    attention_half_length: Number = Field(
        default=400.0, ge=0, description="Length of samples at which it reaches half of that rate."
    )
    bandwidth_tb_s: Number = Field(
        gt=0, description="Memory traffic of elementwise kernels, in 1e12 bytes/s."
    )
    node_gb_s: Number = Field(gt=0, description="Bus bandwidth of collectives inside a node, 1e9 bytes/s.")
    network_gb_s: Number = Field(gt=0, description="The same over nodes, all GPUs of each at once.")
    gpus_per_node: int = Field(default=8, ge=1, le=1024, description="GPUs of a node.")
    watts: Number = Field(gt=0, description="Power of the board at full load; no host, no cooling.")


_A100 = Gpu(
    name="a100-80gb",
    memory_gb=85.0,
    peak_tflops=_PEAK["A100"],
    gemm_tflops=225.0,
    weight_gradient_tflops=190.0,
    fp32_tflops=16.0,
    attention_tflops=135.0,
    attention_half_length=350.0,
    bandwidth_tb_s=1.65,
    node_gb_s=230.0,
    network_gb_s=160.0,
    watts=400.0,
)
_H100 = Gpu(
    name="h100-80gb",
    memory_gb=85.0,
    peak_tflops=_PEAK["H100"],
    gemm_tflops=600.0,
    weight_gradient_tflops=480.0,
    fp32_tflops=50.0,
    attention_tflops=296.0,
    attention_half_length=580.0,
    bandwidth_tb_s=2.7,
    node_gb_s=370.0,
    network_gb_s=320.0,
    watts=700.0,
)
_L40S = Gpu(
    name="l40s",
    memory_gb=47.7,
    peak_tflops=_PEAK["L40S"],
    gemm_tflops=210.0,
    weight_gradient_tflops=175.0,
    fp32_tflops=60.0,
    attention_tflops=120.0,
    attention_half_length=350.0,
    bandwidth_tb_s=0.7,
    node_gb_s=20.0,
    network_gb_s=18.0,
    watts=350.0,
)
_CARDS = (
    _A100.model_copy(update={"name": "a100-40gb", "memory_gb": 42.3, "bandwidth_tb_s": 1.25}),
    _A100,
    _H100,
    _H100.model_copy(update={"name": "h200", "memory_gb": 150.0, "bandwidth_tb_s": 3.9}),
    _L40S,
)
GPUS = {card.name: card for card in _CARDS}


def find_gpu(name_or_path: str) -> Gpu:
    """A card of the table by name, or one that a file describes.

    Raises:
        UserError: no such card and no such file, or the file does not describe a card.
    """
    if name_or_path.lower() in GPUS:
        return GPUS[name_or_path.lower()]
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".json") and not is_file(path):
        close = difflib.get_close_matches(name_or_path.lower(), GPUS, n=1, cutoff=0.4)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise UserError(
            f"--gpu '{name_or_path}' is not a card that is known; {hint}known: {', '.join(GPUS)}, or a YAML "
            "or JSON file that describes yours"
        )
    return _described(read_yaml(path, name_or_path).values, name_or_path)


def _described(values: dict[str, object], source: str) -> Gpu:
    fields = Gpu.model_fields
    for key in values:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(fields)}"
            raise UserError(f"card {source}: unknown key '{key}'; {hint}")
    try:
        return Gpu.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            meaning = fields[key].description
            raise UserError(f"card {source}: '{key}' is missing: {meaning}") from None
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"card {source}: '{key}' is {first['input']!r}: {reason}") from None
