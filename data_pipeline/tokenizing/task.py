"""What is to be tokenised, and which part of it one job does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.sources.discovery import InputFile
from data_pipeline.sources.survey import PassedOver
from data_pipeline.tokenizing.plan import TokenizeOptions


@dataclass(frozen=True)
class Task:
    """Task `index` (from 0) of `count`."""

    index: int
    count: int

    def check(self) -> None:
        """Raises:
        DataError: not one of `count` tasks.
        """
        if self.count < 1:
            raise DataError(f"--num-tasks {self.count} must be at least 1")
        if not 0 <= self.index < self.count:
            raise DataError(
                f"--task {self.index} must be from 0 to {self.count - 1} where --num-tasks is {self.count}"
            )


@dataclass(frozen=True)
class Corpus:
    """What is tokenised and into what.

    passed_over: entries beside the files that are not read.
    """

    files: list[InputFile]
    tokenizer: Path
    directory: Path
    options: TokenizeOptions
    passed_over: Sequence[PassedOver] = ()
    engine: str = "auto"
