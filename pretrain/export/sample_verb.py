"""`python -m pretrain sample`: text from a run or an export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pretrain.errors import UserError


def sample(
    path: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run directory, or an export of one.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="What the text begins with; repeatable. Default: nothing.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file of prompts, one a line, after those of --prompt.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens after the prompt, at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="Divides the logits; 0 is --greedy.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens that have this probability.")
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws, for every prompt anew.")] = 0,
    step: Annotated[
        int | None, typer.Option(min=0, help="Of a run's checkpoint; default: the newest complete one.")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run code that lies in DIR (a run's own needs no asking).")
    ] = False,
) -> None:
    """Write text with a trained model; a run is exported once a checkpoint, into RUN/exports.

    Example: python -m pretrain sample demo/runs/orthogonal --prompt "Return the" --tokens 50 --seed 1
    """
    prompts = [*(prompt or []), *_lines(prompt_file)] or [""]
    from pretrain.export.cache import exported
    from pretrain.export.packages import require_transformers

    require_transformers("sample")
    directory = exported(path, step)
    from pretrain.export.sampling import Sampler, Sampling

    sampler = Sampler(directory, trust_code or directory != path)
    sampling = Sampling(tokens, 0.0 if greedy else temperature, top_p, seed)
    for number, one in enumerate(prompts):
        if number:
            typer.echo()
        sampler.write(one, sampling)


def _lines(file: Path | None) -> list[str]:
    """The lines of a prompt file that are not empty."""
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"--prompt-file {file} cannot be read: {error}") from error
    if not (found := [line for line in lines if line.strip()]):
        raise UserError(f"--prompt-file {file} has no lines")
    return found
