"""Rank function of test_replay.py: one rank of a replay, without the start of a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from laboratory.replay.__main__ import main


def one_rank(payload: dict[str, Any]) -> None:
    """Replay what the words of its command ask for."""
    config, answer, *steps = payload["words"]
    main(config, Path(answer), *map(int, steps))
