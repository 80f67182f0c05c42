"""The smallest run that is still the real program: two layers, four heads, real text, short."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pretrain.config.sources import dump_yaml, parse_overrides
from pretrain.config.tree import Config
from pretrain.config.types import Section

VOCAB_SIZE = 512


def tiny_overrides(shards: Path, runs: Path, name: str, **changes: object) -> list[str]:
    """Overrides that shrink the demo config; `changes` are section__key=value and win."""
    values: dict[str, object] = {
        "run__name": name,
        "run__directory": runs,
        "model__num_layers": 2,
        "model__hidden_size": 32,
        "model__num_attention_heads": 4,
        "model__vocab_size": VOCAB_SIZE,
        "model__dropout": 0.0,
        "data__directory": shards,
        "data__sequence_length": 32,
        "data__micro_batch_size": 2,
        "data__global_batch_size": 8,
        "data__validate_every": 0,
        "data__validation_samples": 8,
        "schedule__steps": 6,
        "schedule__warmup_steps": 2,
        "checkpoint__every": 0,
        "parallel__tensor_model_parallel_size": 1,
        "parallel__timeout_seconds": 300,
        "precision__dtype": "fp32",
        **changes,
    }
    if values.get("optimizer__kind") == "muon":
        # Bounds are those of fp32; auto is bf16 on some CPUs.
        values.setdefault("optimizer__muon__newton_schulz_dtype", "fp32")
    return [f"{key.replace('__', '.')}={value}" for key, value in values.items()]


def tiny_grid(
    shards: Path, directory: Path, fixed: Mapping[str, Any] = MappingProxyType({}), **content: Any
) -> str:
    """Write `directory`/grid.yaml, a grid of tiny runs in `directory`/runs.

    A setting of an entry of the list takes the place of a tiny run's.
    """
    tiny = dict(parse_overrides(tiny_overrides(shards, directory, "unused")))
    varied = {"run.name", "run.directory"}.union(*content.get("list", []))
    settings = {key: value for key, value in tiny.items() if key not in varied} | dict(fixed)
    directory.mkdir(exist_ok=True)
    path = directory / "grid.yaml"
    whole = {"directory": str(directory / "runs"), "set": settings, **content}
    path.write_text(dump_yaml(whole))
    return str(path)


def with_sections(config: Config, **sections: Section) -> Config:
    """The configuration with whole sections replaced, and nothing that followed from the old."""
    current = {name: getattr(config, name) for name in Config.model_fields}
    return Config(**{**current, **sections})
