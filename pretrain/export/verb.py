"""The commands `python -m pretrain export`, `import` and `sample`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.io.files import read_regular
from pretrain.config.arguments import OverridesArgument
from pretrain.errors import UserError


class Dtype(str, Enum):
    """The type in which weights are stored."""

    fp32 = "fp32"
    bf16 = "bf16"


def export(
    run: Annotated[Path, typer.Argument(help="Directory of a run, of any parallel layout.")],
    out: Annotated[Path, typer.Option(help="Directory to make; it must not be there yet.")],
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Step of the checkpoint; default: the newest complete one."),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Type of the weights; default: the run's, fp32 where adapters are folded in."
        ),
    ] = None,
) -> None:
    """Export a run's model for transformers: weights, tokenizer, card; its logits are compared.

    Example: python -m pretrain export demo/runs/orthogonal --out exported/orthogonal
    """
    from pretrain.export.run_exports import export_on_cpu

    typer.echo(f"exporting {run}; the imports take a while")
    facts = export_on_cpu(run, out, step, dtype.value if dtype else None)
    logits, tokenizer = facts["logits"], facts["tokenizer"]
    typer.echo(
        f"{out}: {facts['model']} of step {facts['step']}, {facts['dtype']}; logits differ by at "
        f"most {logits['difference']:.2g} of {logits['largest']:.2g}, ids in "
        f"{tokenizer['different_ids']} of {tokenizer['documents']} documents"
    )


def import_(
    directory: Annotated[
        Path, typer.Argument(help="A directory of Hugging Face: Llama, Qwen3, Starcoder2 or GPT2.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to make; it must not be there yet.")],
    config: Annotated[
        str, typer.Option(help="Configuration that everything but the model is taken from.")
    ] = "small",
    orthonormal: Annotated[
        bool,
        typer.Option(
            "--orthonormal",
            help="Replace Q and K of each head by the nearest orthogonal rows of one length.",
        ),
    ] = False,
    overrides: OverridesArgument = None,
) -> None:
    """Turn a trained model into initial weights and a configuration that freezes its Q and K.

    Example: python -m pretrain import exported/orthogonal --out imported --config demo
    """
    typer.echo(f"importing {directory}; a start takes a while")
    from megatron_patches.engine.compat import prepare_imports

    prepare_imports()
    from pretrain.export.source_model import CONFIG, WEIGHTS, import_model

    imported = import_model(directory, out, config, overrides or [], orthonormal=orthonormal)
    assert imported.given_weights is not None
    spare = imported.given_weights.model["vocab_size"] - imported.model.vocab_size
    if spare:
        typer.echo(
            f"{imported.model.vocab_size:,} tokens, which are the tokenizer's ids; {spare:,} rows "
            "above them are never predicted"
        )
    typer.echo(
        f"{out / WEIGHTS}, {out / CONFIG}: {imported.model.num_layers} layers of "
        f"{imported.model.hidden_size}; train with `python -m pretrain train {out / CONFIG} "
        "run.name=NAME data.directory=SHARDS`"
    )


def sample(
    path: Annotated[
        Path, typer.Argument(metavar="RUN|DIR", help="A run directory, or an export of one.")
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Beginning of the text; repeatable; default: none."),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file of prompts, one a line, after those of --prompt.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens after the prompt, at most.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, help="Divides the logits; 0 is --greedy.")
    ] = 1.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Draw from the likeliest tokens that have this probability."
        ),
    ] = 1.0,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always take the likeliest token.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, help="Seed of the draws; every prompt starts with it."),
    ] = 0,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Step of the run's checkpoint; default: the newest complete one."),
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code", help="Run code that lies in DIR (a run's own needs no asking)."
        ),
    ] = False,
) -> None:
    """Write text with a trained model; a run is first exported into RUN/exports, once a checkpoint.

    Example: python -m pretrain sample demo/runs/orthogonal --prompt "Return the" --tokens 50
    """
    prompts = [*(prompt or []), *_lines(prompt_file)] or [""]
    for text in prompts:
        if text != text.encode(errors="replace").decode():
            raise UserError(f"--prompt {text!r} is not UTF-8; give it in --prompt-file, in UTF-8")
    typer.echo(f"sampling from {path}; the imports take a while", err=True)
    from pretrain.export.sampling import Sampler, Sampling

    sampling = Sampling(tokens, 0.0 if greedy else temperature, top_p, seed)
    from pretrain.export.models import require_transformers
    from pretrain.export.run_exports import exported

    require_transformers("sample")
    directory = exported(path, step)
    typer.echo(f"loading {directory}", err=True)
    sampler = Sampler(directory, trust_code or directory != path)
    for number, text in enumerate(prompts):
        if number:
            typer.echo()
        sampler.write(text, sampling)


def _lines(file: Path | None) -> list[str]:
    """Return the lines of a prompt file that are not empty."""
    if file is None:
        return []
    try:
        lines = read_regular(file).decode().splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--prompt-file {file} cannot be read: {reason}") from error
    if not (prompts := [line for line in lines if line.strip()]):
        raise UserError(f"--prompt-file {file} has no lines")
    return prompts
