"""Words of files on their way to a terminal: escapes, whichever way they are printed."""

from __future__ import annotations

import io
import sys

import pytest
import typer
from rich.console import Console

from data_pipeline.io.words import WordStream, guard_output, shown, shown_in_line


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("naïve – 数字 \U0001f600 ‘a’\u00a0b", "naïve – 数字 \U0001f600 ‘a’\u00a0b"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b]52;c;\x07\x00\r\x7f\x9b", r"\x1b]52;c;\x07\x00\r\x7f\x9b"),
        ("a\u202eb\u2066c\u200f\u2028", r"a\u202eb\u2066c\u200f\u2028"),
        ("\udc80\ufeff\u200b\U000e0041", r"\udc80\ufeff\u200b\U000e0041"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),  # a joiner that Persian needs
    ],
)
def test_what_is_seen_of_a_text(text: str, seen: str) -> None:
    assert shown(text) == seen


def test_every_way_to_print_shows_escapes_and_rich_still_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", output)
    guard_output()
    guard_output()  # once is enough
    assert isinstance(sys.stdout, WordStream) and sys.stdout.rich_proxied_file is output
    print("a\x1b[2J")
    typer.echo("b\x1b]0;title\x07", err=True)
    Console(force_terminal=True).print("[bold]c[/bold]")
    sys.stderr.write("\r 10 %")
    lines = ["a\\x1b[2J", "b\\x1b]0;title\\x07", "\x1b[1mc\x1b[0m", "\r 10 %"]
    assert output.getvalue().split("\n") == lines
    assert shown_in_line("a\nb") == "a\\nb"
