"""The verbs `replay` and `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.io.files import refuse_unwritable

RunArgument = Annotated[Path, typer.Argument(help="Run directory.")]


def replay(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings of another layout.", metavar="[section.key=value]..."),
    ] = None,
    step: Annotated[int, typer.Option(min=1, help="The step to repeat.")] = 1,
    local_ranks: Annotated[
        int, typer.Option(min=0, help="Ranks on this machine; 0: as the run had.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Directory for report.md and replay.json.")] = Path(
        "replay"
    ),
) -> None:
    """Repeat one step of a run; show its documents, losses and gradients.

    Example: python -m pretrain replay demo/runs/orthogonal --step 123
    """
    refuse_unwritable(out)
    from laboratory.replay.prepare import look_up, replayed
    from laboratory.replay.report import replay_document
    from laboratory.study.report import finish

    past = look_up(run, step)
    with replayed(past, overrides or (), local_ranks) as (_, answer):
        document = replay_document(past, answer, another_layout=bool(overrides or local_ranks))
        finish(document, out, log_width=120)


def diff(
    one: RunArgument,
    other: RunArgument,
    out: Annotated[Path, typer.Option(help="Directory for report.md and diff.json.")] = Path(
        "diff"
    ),
) -> None:
    """Find the first step and the first tensor in which two runs differ, and by how much.

    Example: python -m pretrain diff demo/runs/vanilla demo/runs/orthogonal
    """
    refuse_unwritable(out)
    from laboratory.study.report import finish
    from laboratory.study.seeds import refuse_twice
    from megatron_patches.engine.compat import prepare_imports

    prepare_imports()
    from laboratory.replay.report import diff_document

    refuse_twice((one, other))
    finish(diff_document(one, other), out)
