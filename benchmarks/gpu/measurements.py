"""What a process measures before its time is over, as a file that is written after each number."""

from __future__ import annotations

import argparse
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.runs.directory import write_json


class Measurements:
    """Measured values, written to a file after each.

    `values`: as given, the traceback of every failure by name, and the names for which no time was
    left.
    """

    def __init__(self, file: Path, seconds: float, **values: Any) -> None:
        self._file = file
        self.until = time.monotonic() + seconds
        self.values: dict[str, Any] = {**values, "failed": {}, "left_out": []}

    def attempt(self, name: str, measure: Callable[[], Any], section: str | None = None) -> None:
        """Make one measurement, unless time is over, and write the file.

        Args:
            name: of the measurement.
            measure: returns its result.
            section: of the values, into which the result goes; None keeps it out.
        """
        if time.monotonic() > self.until:
            self.values["left_out"].append(name)
        else:
            try:
                result = measure()
                if section is not None:
                    self.values[section][name] = result
                    print(name, result, flush=True)
            except Exception:  # the other measurements are still worth having
                self.values["failed"][name] = traceback.format_exc(limit=-12)
                print(f"{name} failed", flush=True)
        self.write()

    def write(self) -> None:
        write_json(self._file, self.values)


def measuring_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that `StageContext.measure` gives."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after which nothing new begins"
    )
    parser.add_argument("--json", type=Path, required=True)
    return parser
