"""summary.json: the result of a finished run, for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.runs.tags import LOSS, PERPLEXITY, PERPLEXITY_OF_SOURCE, VALIDATION_LOSS


def summary_of(last: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json says, from the last object of metrics.jsonl."""
    return {
        "step": last["step"],
        "tokens": last["tokens"],
        "samples": last["samples"],
        "loss": last[LOSS.tag],
        "validation": {
            "loss": last[VALIDATION_LOSS.tag],
            "perplexity": last[PERPLEXITY.tag],
            "perplexity_by_source": PERPLEXITY_OF_SOURCE.members(last),
        },
    }
