"""The verb `show`: every value, its origin, and the sizes and length of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from shutil import get_terminal_size
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_patches.bank.factors import block_sizes
from megatron_patches.recipe.counting import (
    count_parameters,
    model_flops_per_token,
)
from megatron_patches.recipe.optimizers import rule_of
from pretrain.config.deepspeed import WHOLE_STATE_BYTES, settings_name
from pretrain.config.keys import by_section
from pretrain.config.load import LoadedConfig, load_config_with_origins
from pretrain.config.schedule import Phase, last_stable_step
from pretrain.config.tree import Config

PIPED_WIDTH = 100  # so that text that is piped or logged is not folded at 80 columns


def render_show(name_or_path: str, overrides: Sequence[str] = (), *, meanings: bool = False) -> str:
    """Return the resolved configuration as text: each value with its origin, and a summary.

    Args:
        meanings: Whether to add the meaning of each key.

    Raises:
        UserError: as `load_config`.
    """
    loaded = load_config_with_origins(name_or_path, overrides)
    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in ("key", "value", "from"):
        table.add_column(column, no_wrap=column == "key")
    explained: list[RenderableType] = []
    for *row, meaning in value_rows(loaded):
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
        explained += [Text("{} = {}  ({})".format(*row)), Padding(Text(meaning), (0, 0, 0, 4))]
    summary = Table(box=None, pad_edge=False, show_header=False)
    for name, value in summary_rows(loaded.config):
        summary.add_row(Text(name), Text(value))
    console = Console(width=get_terminal_size((PIPED_WIDTH, 24)).columns, no_color=True)
    with console.capture() as capture:
        console.print(*(explained if meanings else [table]), "", summary, sep="\n")
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def render_tensors(name_or_path: str, overrides: Sequence[str] = ()) -> str:
    """Return what trains in some phase of the run as text, a line a tensor.

    A line has the name that patterns match, the shape over all tensor-parallel ranks, the rule of
    the optimizer, the peak rate and the weight decay.

    Raises:
        UserError: as `load_config`.
    """
    config = load_config_with_origins(name_or_path, overrides).config
    optimizer = config.optimizer
    lines = [("name", "shape", "rule", "peak rate", "weight decay")]
    for tensor in config.ever_trained:
        shape = "x".join(map(str, tensor.shape))
        rule = rule_of(tensor, optimizer.rules).name
        rate = optimizer.learning_rate * optimizer.rate_factor(tensor)
        decay = optimizer.weight_decay * optimizer.decay_factor(tensor)
        lines.append((tensor.name, shape, rule, f"{rate:g}", f"{decay:g}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def value_rows(loaded: LoadedConfig) -> list[tuple[str, str, str, str]]:
    """Return (key, value, origin, meaning) of every value, in the order of the tree.

    An origin is `FILE:LINE`, `override`, `default`, or `derived` for an unset value that follows
    from others.
    """
    config, rows = loaded.config, []
    for section, content in by_section(config.values).items():
        section_object: Any = reduce(getattr, section.split("."), config)
        for key, value in content.items():
            path = f"{section}.{key}"
            unset = getattr(section_object, key) is None
            origin = "derived" if unset and value is not None else _origin(path, loaded.origins)
            meaning = type(section_object).model_fields[key].description or ""
            rows.append((path, _text(value), origin, meaning))
    return rows


def summary_rows(config: Config) -> list[tuple[str, str]]:
    """Return (name, value) of the summary: parameters, length, arithmetic."""
    shape, policy = config.shape, config.policy
    count = count_parameters(shape, policy)
    model_flops = model_flops_per_token(shape, policy)
    steps_flops = model_flops * config.tokens_per_step * config.total_steps
    excess = round(config.total_flops / steps_flops - 1, 3)
    stable = f"{last_stable_step(config.schedule, config.total_steps):,}"
    executed = f"executed: {abs(excess):.1%} {'more' if excess > 0 else 'fewer'}"
    factors = []
    if policy.structured:
        a, b = block_sizes(shape.hidden_size, shape.head_dim)
        held = "once for both" if policy.shared else "for each of both"
        blocks = f"{a} blocks of {b} x {b}, then {b} of {a} x {a}, {held}"
        factors = [(f"{'trained' if policy.trainable else 'frozen'} Query/Key factors", blocks)]
    return [
        ("parameters, total", f"{count.total:,} ({count.total / 1e6:.1f} M)"),
        ("parameters, trainable", f"{count.trainable:,} ({count.trainable / 1e6:.1f} M)"),
        (
            "parameters, frozen",
            f"{count.frozen:,} ({count.frozen / 1e6:.2f} M, {count.frozen / count.total:.1%})",
        ),
        *(_phase_row(config, phase) for phase in config.phases[1:]),
        ("tokens per step", f"{config.tokens_per_step:,}"),
        ("total steps", f"{config.total_steps:,}"),
        ("total tokens", f"{config.tokens_per_step * config.total_steps:,}"),
        ("total FLOPs, executed", f"{config.total_flops:.4g}"),
        *([("last step before the decay", stable)] if config.schedule.kind == "wsd" else []),
        *factors,
        ("training FLOPs per token", f"{model_flops:.4g}; {executed}"),
        ("DeepSpeed settings", _deepspeed_text(config)),
        ("run directory", str(config.run_path)),
    ]


def _deepspeed_text(config: Config) -> str:
    """Return the name of the DeepSpeed settings; with `auto` the number of ranks may decide."""
    size = config.parallel.tensor_model_parallel_size
    single = settings_name(config, size)
    many = settings_name(config, size * 2**20)
    if single == many:
        return single
    return f"{single}; {many} where it saves a rank over {WHOLE_STATE_BYTES >> 30} GiB"


def _phase_row(config: Config, phase: Phase) -> tuple[str, str]:
    count = count_parameters(config.shape, config.policy, phase.number)
    steps = phase.decay_steps
    decay = f"; that of these rows falls to 0 over the {steps:,} steps before" if steps else ""
    return (
        f"from step {phase.first_step:,} on",
        f"{count.trainable:,} trainable ({phase.change}), learning rate x "
        f"{phase.learning_rate_factor:g}{decay}",
    )


def _origin(path: str, origins: Mapping[str, str]) -> str:
    """Return the origin of a value, or of the latest value inside it (deepspeed.overrides)."""
    inside = [
        origin
        for origin_path, origin in origins.items()
        if origin_path == path or origin_path.startswith(f"{path}.")
    ]
    return inside[-1] if inside else "default"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
