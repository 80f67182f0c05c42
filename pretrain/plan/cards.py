"""The cards: memory, rates that programs reach on them, and the network around them.

Every number is an assumption until somebody measures it on the card.
"""

from __future__ import annotations

import difflib

from pydantic import Field, ValidationError

from data_pipeline.io.home import expand_home
from pretrain.config.sources import did_you_mean, is_file, read_yaml
from pretrain.config.types import Number, Section
from pretrain.errors import UserError
from pretrain.ranks.devices import PEAK_BF16_TFLOPS

_PEAK = dict(PEAK_BF16_TFLOPS)


class Gpu(Section):
    """A card and the cluster around it. Rates are what programs reach, not the data sheet's.

    A user's own card is a YAML or JSON file with these fields.
    """

    name: str = Field(min_length=1, max_length=60, description="What it is called in the output.")
    memory_gb: Number = Field(gt=0, description="Memory that torch reports, in 1e9 bytes.")
    peak_tflops: Number = Field(
        gt=0, description="The data sheet's dense bf16 rate, for MFU and HFU."
    )
    gemm_tflops: Number = Field(
        gt=0, description="bf16 products of forward and of input gradients."
    )
    weight_gradient_tflops: Number = Field(gt=0, description="bf16 products of weight gradients.")
    fp32_tflops: Number = Field(gt=0, description="Products in fp32, without TF32.")
    attention_tflops: Number = Field(
        gt=0, description="Flash attention over long samples, causal half."
    )
    attention_half_length: Number = Field(
        default=400.0, ge=0, description="Length of samples at which it reaches half of that rate."
    )
    bandwidth_tb_s: Number = Field(
        gt=0, description="Memory traffic of elementwise kernels, in 1e12 bytes/s."
    )
    node_gb_s: Number = Field(
        gt=0, description="Bus bandwidth of collectives inside a node, 1e9 bytes/s."
    )
    network_gb_s: Number = Field(gt=0, description="The same over nodes, all GPUs of each at once.")
    gpus_per_node: int = Field(default=8, ge=1, le=1024, description="GPUs of a node.")
    watts: Number = Field(gt=0, description="Power of the board at full load; no host, no cooling.")


_COLUMNS = [field for field in Gpu.model_fields if field != "gpus_per_node"]
_CARDS = (
    ("a100-40gb", 42.3, _PEAK["A100"], 225.0, 190.0, 16.0, 135.0, 350.0, 1.25, 230.0, 160.0, 400.0),
    ("a100-80gb", 85.0, _PEAK["A100"], 225.0, 190.0, 16.0, 135.0, 350.0, 1.65, 230.0, 160.0, 400.0),
    ("h100-80gb", 85.0, _PEAK["H100"], 600.0, 480.0, 50.0, 296.0, 580.0, 2.7, 370.0, 320.0, 700.0),
    ("h200", 150.0, _PEAK["H100"], 600.0, 480.0, 50.0, 296.0, 580.0, 3.9, 370.0, 320.0, 700.0),
    ("l40s", 47.7, _PEAK["L40S"], 210.0, 175.0, 60.0, 120.0, 350.0, 0.7, 20.0, 18.0, 350.0),
)
GPUS = {str(card[0]): Gpu.model_validate(dict(zip(_COLUMNS, card, strict=True))) for card in _CARDS}


def find_gpu(name_or_path: str) -> Gpu:
    """Return a card of the table by name, or one that a file describes.

    Raises:
        UserError: no such card and no such file, or the file does not describe a card.
    """
    if name_or_path.lower() in GPUS:
        return GPUS[name_or_path.lower()]
    path = expand_home(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".json") and not is_file(path):
        close = difflib.get_close_matches(name_or_path.lower(), GPUS, n=1, cutoff=0.4)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise UserError(
            f"--gpu '{name_or_path}' is not a card that is known; {hint}known: {', '.join(GPUS)}, "
            "or a YAML or JSON file that describes yours"
        )
    return _described(read_yaml(path, name_or_path, "card").values, name_or_path)


def _described(values: dict[str, object], source: str) -> Gpu:
    fields = Gpu.model_fields
    for key in values:
        if key not in fields:
            hint = did_you_mean(str(key), fields) or f"; known: {', '.join(fields)}"
            raise UserError(f"card {source}: unknown key '{key}'{hint}")
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
