"""Hostile input through the whole of tokenize: counted, named, and the rest intact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.verify import find_problems
from data_pipeline.tokenizing.rejects import Limits
from tests.data_pipeline.helpers import Workshop, contents, run
from tests.data_pipeline.sources.test_records import HOSTILE
from tests.data_pipeline.tokenizing.test_tokenize import texts_of

ANY = Limits(max_reject_rate=1)
STRICT = Limits(strict=True)
GOOD = [f"document {number} is good" for number in range(40)]


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of bad lines among good ones, a clean file, and one that is cut short."""
    corpus = tmp_path_factory.mktemp("hostile")
    bad = [content + b"\n" for content, _ in HOSTILE]
    lines = [[line(text)] for text in GOOD]
    for number, content in enumerate(bad):
        lines[number].append(content)
    (corpus / "a.jsonl").write_bytes(b"".join(part for group in lines[:10] for part in group))
    (corpus / "b.jsonl.zst").write_bytes(
        zstandard.compress(b"".join(part for group in lines[10:30] for part in group))
    )
    (corpus / "c.jsonl").write_bytes(b"".join(part for group in lines[30:] for part in group))
    whole = zstandard.compress(b"".join(line(f"{n * 7919**9 % 10**30}") for n in range(10_000)))
    (corpus / "d.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    return corpus


def expected_rejects() -> list[tuple[str, int, str]]:
    """(file, line, reason) of all but the last file."""
    in_a = [("a.jsonl", 2 * number + 2, reason) for number, (_, reason) in enumerate(HOSTILE[:10])]
    return in_a + [
        ("b.jsonl.zst", 2 * number + 2, reason) for number, (_, reason) in enumerate(HOSTILE[10:])
    ]


@pytest.mark.distributed
def test_counted_by_reason_named_by_line_and_the_rest_intact(
    workshop: Workshop, hostile: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    more = ("--validation-fraction", "0", "--max-reject-rate", "1")
    first = run(*workshop.command(out, "--workers", "2", *more, corpus=hostile))
    assert first.code == 3
    assert "damaged input d.jsonl.zst: truncated: the file is cut short" in first.err
    assert "2 empty" not in first.out and "1 truncated" in first.out, first.err
    rejects = [json.loads(entry) for entry in (out / "rejects.jsonl").read_bytes().splitlines()]
    assert [(r["file"], r["line"], r["reason"]) for r in rejects[:-1]] == expected_rejects()
    assert (rejects[-1]["file"], rejects[-1]["reason"]) == ("d.jsonl.zst", "truncated")
    assert set(rejects[0]) == {"file", "line", "reason", "detail", "kept"}
    manifest = read_manifest(out)
    reasons = [reason for _, _, reason in expected_rejects()] + ["truncated"]
    assert manifest.rejects == {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    texts = texts_of(manifest)["train", "default"]
    assert texts[:40] == GOOD and len(texts) == 40 + rejects[-1]["line"] - 1 > 1000
    assert find_problems(manifest) == []
    # The same bytes by another number of workers.
    again = run(*workshop.command(tmp_path / "b", "--allow-damaged", *more, corpus=hostile))
    assert again.code == 0 and contents(tmp_path / "b") == contents(out)


def test_strict_stops_at_the_line_and_keeps_finished_units(
    workshop: Workshop, hostile: Path, tmp_path: Path
) -> None:
    root = tmp_path / "in"
    out = tmp_path / "out"
    root.mkdir()
    (root / "0.jsonl").write_bytes(line("fine"))
    clean = (hostile / "c.jsonl").read_bytes()
    (root / "1.jsonl").write_bytes(clean + b"{bad\n" + line("more"))
    with pytest.raises(DataError, match=r"in/1\.jsonl:11: bad_json: .*--strict"):
        workshop.tokenize(out, root, limits=STRICT)
    assert not (out / "manifest.json").exists()
    assert (out / "units" / "small_00000.json").exists()
    # Without --strict the same directory continues; with it, what was let through is remembered.
    manifest, _ = workshop.tokenize(out, root, limits=ANY)
    assert manifest.rejects == {"bad_json": 1}
    with pytest.raises(DataError, match="names rejected lines of an earlier run"):
        workshop.tokenize(out, root, limits=STRICT)


def test_strict_accepts_what_is_only_unusual(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(line("nul \u0000 in the text"))
    path = tmp_path / "in.jsonl"
    manifest, _ = workshop.tokenize(tmp_path / "out", path, limits=STRICT, validation_fraction=0)
    assert (manifest.rejects, manifest.unusual) == ({}, {"contains_nul": 1})
    assert texts_of(manifest)["train", "default"] == ["nul \u0000 in the text"]
    assert json.loads((tmp_path / "out" / "rejects.jsonl").read_bytes())["kept"] is True
