"""Differences between two descriptions of a blend (`Blend.describe`), to refuse a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Description = Mapping[str, Any]


def data_changes(saved: Description, live: Description) -> list[str]:
    """List the changes of the data between two descriptions.

    Paths of directories, and the order and unit of the weights, do not count.

    Args:
        saved: Description in a checkpoint.
        live: Description of the present data.

    Returns:
        Changes such as "/data/a source Book has 9,000 tokens, was 8,000"; none if the samples are
        equal.
    """
    pairs, removed, added = _pair(saved["directories"], live["directories"])
    changes = []
    if saved["tokenizer"] != live["tokenizer"]:
        changes.append(
            f"the tokenizer is another one (SHA-256 {live['tokenizer'][:8]}…, was "
            f"{saved['tokenizer'][:8]}…)"
        )
    changes += [f"{directory['directory']} is no longer there" for directory in removed]
    changes += [f"{directory['directory']} is new" for directory in added]
    for saved_directory, live_directory in pairs:
        if saved_directory["fingerprint"] != live_directory["fingerprint"]:
            changes += _content_changes(saved_directory, live_directory)
    names = {
        live_directory["fingerprint"]: live_directory["directory"] for _, live_directory in pairs
    }
    renamed = {
        saved_directory["fingerprint"]: live_directory["fingerprint"]
        for saved_directory, live_directory in pairs
    }
    return changes + _share_changes(saved["parts"], live["parts"], names, renamed)


def _pair(
    saved: list[Description], live: list[Description]
) -> tuple[list[tuple[Description, Description]], list[Description], list[Description]]:
    """Match directories by content, then by path; a last one on each side is a pair too."""
    unmatched_saved = list(saved)
    unmatched_live = list(live)
    pairs = []
    for key in ("fingerprint", "directory"):
        for directory in list(unmatched_saved):
            match = next(
                (candidate for candidate in unmatched_live if candidate[key] == directory[key]),
                None,
            )
            if match is not None:
                pairs.append((directory, match))
                unmatched_saved.remove(directory)
                unmatched_live.remove(match)
    if len(unmatched_saved) == len(unmatched_live) == 1:
        pairs.append((unmatched_saved.pop(), unmatched_live.pop()))
    return pairs, unmatched_saved, unmatched_live


def _content_changes(before: Description, after: Description) -> list[str]:
    where = after["directory"]
    changes = []
    if before["directory"] != where:
        changes.append(f"{where} is used in place of {before['directory']}")
    old, new = before["sources"], after["sources"]
    changes += [f"{where} has no source {source} any more" for source in old if source not in new]
    changes += [f"{where} has the new source {source}" for source in new if source not in old]
    for source in (source for source in new if source in old):
        was = old[source]
        now = new[source]
        which = f"{where} source {source}"
        counts = [unit for unit in ("documents", "tokens") if was[unit] != now[unit]]
        changes += [f"{which} has {now[unit]:,} {unit}, was {was[unit]:,}" for unit in counts]
        if was["sha256"] != now["sha256"] and was["tokens"] == now["tokens"]:
            changes.append(f"{which} has as many tokens as before but others, or in another order")
    return changes or [
        f"{where} holds the same training tokens in other files, or another held-out split"
    ]


def _share_changes(
    saved: list[Description],
    live: list[Description],
    names: Mapping[str, str],
    renamed: Mapping[str, str],
) -> list[str]:
    """List the parts whose share of the samples changed, of directories on both sides only."""
    old = {(renamed.get(p["fingerprint"]), p["source"]): p["share"] for p in saved}
    new = {(p["fingerprint"], p["source"]): p["share"] for p in live}
    changes = []
    for key in sorted(old.keys() | new.keys(), key=str):
        if key[0] is None or key[0] not in names or old.get(key) == new.get(key):
            continue
        part = names[key[0]] + (f" source {key[1]}" if key[1] else "")
        if key not in old:
            changes.append(f"{part} is new in the blend, with {new[key]} of the samples")
        elif key not in new:
            changes.append(f"{part} is no longer in the blend, it gave {old[key]} of the samples")
        else:
            changes.append(f"{part} gives {new[key]} of the samples, was {old[key]}")
    return changes
