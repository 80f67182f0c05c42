"""Rank functions of test_release.py: train again and again, and count what the process holds."""

from __future__ import annotations

import gc
from typing import Any

import psutil
from megatron.core.models.gpt import GPTModel

from pretrain.config.load import load_config
from pretrain.ranks.signals import StopSignals
from pretrain.training.loop import train
from tests.distributed.workers.runs import of_all_ranks


def held_after_each(payload: dict[str, Any]) -> list[list[dict[str, int]]]:
    """For each rank: threads, open files and models alive after each training."""
    held = []
    for overrides in payload["runs"]:
        train(load_config("demo", overrides), StopSignals())
        held.append(_held())
    return of_all_ranks(held)


def _held() -> dict[str, int]:
    process = psutil.Process()
    return {
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "models": sum(isinstance(thing, GPTModel) for thing in gc.get_objects()),
    }
