"""The command line of `plan`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from megatron_patches.recipe.variants import ORDINARY
from pretrain.config.arguments import ConfigArgument, OverridesArgument


def plan(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[int, typer.Option(min=1, max=2**20, help="GPUs in all, one rank each.")] = 8,
    gpu: Annotated[
        str,
        typer.Option(
            help="a100-40gb, a100-80gb, h100-80gb, h200, l40s, or a YAML or JSON file of yours."
        ),
    ] = "a100-80gb",
    baseline: Annotated[
        str, typer.Option(help="The variant to put beside the configuration's own.")
    ] = ORDINARY,
    price: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, help="Price per GPU-hour; enables the cost estimate."),
    ] = None,
    mtbf_hours: Annotated[
        float,
        typer.Option(min=0.001, max=1e9, help="Mean hours between failures of one node (assumed)."),
    ] = 1000,
    write_gb_s: Annotated[
        float,
        typer.Option(
            min=1e-6,
            max=1e9,
            help="Write bandwidth of checkpoints, all ranks together, GB/s (assumed).",
        ),
    ] = 2,
    chinchilla: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            help="Tokens per parameter: prints horizon, batch size and learning rate.",
        ),
    ] = None,
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Estimate memory, time, energy and cost of a run, beside the same run of vanilla.

    What is exact and what is estimated is marked. Needs no GPU, builds no model.

    Example: python -m pretrain plan large --gpus 16 --gpu a100-80gb
    """
    from pretrain.plan.estimate import Request, make_plan
    from pretrain.plan.report import as_json, render

    request = Request(
        config=config,
        overrides=tuple(overrides or ()),
        gpus=gpus,
        gpu=gpu,
        baseline=baseline,
        price=price,
        mtbf_hours=mtbf_hours,
        write_gb_s=write_gb_s,
        chinchilla=chinchilla,
    )
    run_plan = make_plan(request)
    typer.echo(json.dumps(as_json(run_plan), indent=1) if in_json else render(run_plan))
