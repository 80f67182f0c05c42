"""Notation of layers ("0-3", "50%-100%"), and the heads that a fraction stands for."""

from __future__ import annotations

import re

from megatron_patches.errors import MethodError

_RANGE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(%?)(?:-(\d{1,9}(?:\.\d{1,9})?)(%?))?")


def layer_range(text: str, num_layers: int) -> range:
    """Return the layers that `text` names, counted from 0; MethodError if the model does not have them.

    "4" is one layer, "4-7" four of them (both ends count), "33%-67%" the layers between these parts of the
    depth, each end rounded to a whole number of layers, so that "0%-50%" and "50%-100%" share none.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise MethodError(f"'{text}' names no layers; write 4, 4-7 or 50%-100%")
    first, percent, last, last_percent = match.groups()
    if last is not None and percent != last_percent:
        raise MethodError(f"'{text}' mixes layer numbers and percent; write 4-7 or 50%-100%")
    if percent:
        if last is None or not 0 <= float(first) < float(last) <= 100:
            raise MethodError(f"'{text}' is not a part of the depth; write two rising percentages, 50%-100%")
        return range(round(num_layers * float(first) / 100), round(num_layers * float(last) / 100))
    if "." in first or "." in (last or ""):
        raise MethodError(f"'{text}' is not a range of whole layer numbers; write 4-7")
    layers = range(int(first), int(last if last is not None else first) + 1)
    if not layers or layers.stop > num_layers:
        raise MethodError(f"layers '{text}' do not exist: the model has layers 0 to {num_layers - 1}")
    return layers


def spread(fraction: float, num_groups: int) -> tuple[int, ...]:
    """Choose a fraction of `num_groups` heads, spread evenly, so that tensor-parallel ranks get equal shares.

    Half of four are (1, 3). The number is rounded to whole heads; MethodError if that makes none or all of a
    fraction between 0 and 1.
    """
    if not 0 <= fraction <= 1:
        raise MethodError(f"{fraction} is not a fraction of the heads; give a number from 0 to 1")
    count = round(fraction * num_groups)
    if (0 < fraction < 1) and count in (0, num_groups):
        amount = "none" if count == 0 else "all"
        raise MethodError(f"{fraction} of {num_groups} heads rounds to {amount} of them; say 0 or 1 for that")
    return tuple(g for g in range(num_groups) if (g + 1) * count // num_groups > g * count // num_groups)
