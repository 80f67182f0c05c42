"""Configuration of a run that anybody may have made, for verbs that read runs.

A run directory may come from a stranger, and its config.yaml names places to write to, trackers on
the network and monitors of DeepSpeed. Loaded by this module it names none of them any more: what a
verb must write goes to a directory of the verb's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.io.files import write_text_atomically
from pretrain.config.deepspeed import AUTO, given_settings, without_side_effects
from pretrain.config.load import load_config
from pretrain.config.sources import override_text
from pretrain.config.tree import Config

NOWHERE = Path(os.devnull)
"""A directory in which nothing can be created."""
_QUIET = (
    "telemetry.tensorboard=false",
    "telemetry.wandb=false",
    "telemetry.profile=null",
    "telemetry.sample_prompts=[]",
    "checkpoint.every=0",
    "checkpoint.keep_last=1000",
    "checkpoint.export_at_end=false",
    "checkpoint.fall_back=false",
)


def load_foreign(path: Path, overrides: Sequence[str] = (), scratch: Path = NOWHERE) -> Config:
    """Load a run's configuration so that nothing it names is written to or connected with.

    Args:
        overrides: section.key=value of the verb.
        scratch: Existing directory for the output of steps that are made again; NOWHERE: no step is
            made, and DeepSpeed's settings do not matter.

    Raises:
        UserError: as `load_config`, or DeepSpeed's settings cannot be read.
    """
    deepspeed: dict[str, Any] = {"deepspeed.config": AUTO, "deepspeed.overrides": {}}
    # Monitors of DeepSpeed write files and send data, so only settings for the numbers are kept.
    if scratch != NOWHERE:
        deepspeed_section = load_config(str(path), overrides).deepspeed
        deepspeed["deepspeed.config"] = deepspeed_section.config
        deepspeed["deepspeed.overrides"] = without_side_effects(deepspeed_section.overrides)
        if (settings := given_settings(deepspeed_section.config)) is not None:
            copy = scratch / "deepspeed.json"
            write_text_atomically(copy, json.dumps(without_side_effects(settings)))
            deepspeed["deepspeed.config"] = str(copy)
    redirected = {
        "run.directory": str(scratch / "runs"),
        "data.cache_directory": str(scratch / "sample_order"),
        **deepspeed,
    }
    redirections = [override_text(key, value) for key, value in redirected.items()]
    return load_config(str(path), [*overrides, *_QUIET, *redirections])
