"""Actions that take turns, and their medians as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
Seconds = dict[str, list[float]]
"""{action: seconds, round by round}"""


def options_parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have.

    Args:
        rounds: Default of --rounds.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=rounds, help="that count; one does not")
    parser.add_argument("--json", type=Path, help="file for the medians")
    return parser


def in_turn(items: Sequence[T], number: int) -> list[T]:
    """Return the items of a round in an order that rotates from round to round.

    Args:
        items: At least one.
        number: Number of the round.
    """
    first = number % len(items)
    return [*items[first:], *items[:first]]


def take_turns(
    actions: Mapping[str, Callable[[], object]], rounds: int, now: Callable[[], float]
) -> Seconds:
    """Time each action once a round, after a round that does not count; who begins rotates.

    Args:
        actions: Actions by name.
        rounds: Number of rounds that count.
        now: The clock, in seconds.
    """
    seconds: Seconds = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in in_turn(list(actions.items()), number):
            started = now()
            action()
            # Round 0 warms caches and allocators.
            if number:
                seconds[name].append(now() - started)
    return seconds


def ratio(mine: list[float], base: list[float]) -> dict[str, float]:
    """Divide the two times of each round.

    Args:
        mine: Seconds, round by round.
        base: Seconds of the same rounds, by which is divided.

    Returns:
        `median`, and the quartiles `low` and `high`.
    """
    ratios = [
        mine_seconds / base_seconds for mine_seconds, base_seconds in zip(mine, base, strict=True)
    ]
    ratios = ratios if len(ratios) > 1 else 2 * ratios  # quartiles need two
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def report(seconds: Seconds, file: Path | None) -> None:
    """Print each action's median, and its median ratio per round to the first of its group.

    Args:
        seconds: The actions, named GROUP: ACTION.
        file: JSON file of the same numbers; None: none is written.
    """
    bases: Seconds = {}
    for name, values in seconds.items():
        bases.setdefault(name.partition(":")[0], values)
    ratios = {
        name: ratio(values, bases[name.partition(":")[0]]) for name, values in seconds.items()
    }
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rounds = len(next(iter(seconds.values())))
    print(f"{f'{rounds} rounds':40}{'ms':>12}{'ratio to the first (quartiles)':>34}")
    for name, of_first in ratios.items():
        cell = f"{of_first['median']:.3f} ({of_first['low']:.3f} – {of_first['high']:.3f})"
        print(f"{name:40}{1e3 * medians[name]:12.2f}{cell:>34}")
    if file:
        file.write_text(json.dumps({"seconds": medians, "ratio": ratios}, indent=1) + "\n")
