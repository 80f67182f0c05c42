"""Differences between two descriptions of a blend (`Blend.describe`): for refusing a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Description = Mapping[str, Any]


def data_changes(saved: Description, live: Description) -> list[str]:
    """List the changes of the data between two descriptions.

    Where the directories lie does not count, nor in which order or unit the weights were given.

    Args:
        saved: the description in a checkpoint.
        live: the description of the data that there is.

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
    for before, after in pairs:
        if before["fingerprint"] != after["fingerprint"]:
            changes += _content_changes(before, after)
    names = {after["fingerprint"]: after["directory"] for _, after in pairs}
    renamed = {before["fingerprint"]: after["fingerprint"] for before, after in pairs}
    return changes + _share_changes(saved["parts"], live["parts"], names, renamed)


def _pair(
    saved: list[Description], live: list[Description]
) -> tuple[list[tuple[Description, Description]], list[Description], list[Description]]:
    """Match directories by content, then by path; if one is left on each side, those two."""
    before = list(saved)
    after = list(live)
    pairs = []
    for key in ("fingerprint", "directory"):
        for one in list(before):
            match = next((other for other in after if other[key] == one[key]), None)
            if match is not None:
                pairs.append((one, match))
                before.remove(one)
                after.remove(match)
    if len(before) == len(after) == 1:
        pairs.append((before.pop(), after.pop()))
    return pairs, before, after


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
    """List the parts whose share of the samples is another, of directories on both sides only."""
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
