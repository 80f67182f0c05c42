"""`python -m pretrain export`: a run's model out of the run directory."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer


class Dtype(str, Enum):
    """What weights are stored in."""

    fp32 = "fp32"
    bf16 = "bf16"


def export(
    run: Annotated[Path, typer.Argument(help="Directory of a run, of any parallel layout.")],
    out: Annotated[Path, typer.Option(help="Directory to make; it must not be there yet.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Of the checkpoint; default: the newest complete one.")
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of the weights; default: the run's, fp32 where adapters are folded in."),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(help="OWNER/NAME on the hub to send it to; made private if it is new.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
) -> None:
    """Export a run's model for transformers: weights, tokenizer, model card; its logits are compared.

    Example: python -m pretrain export demo/runs/orthogonal --out exported/orthogonal
    """
    facts = export_on_cpu(run, out, step, dtype.value if dtype else None)
    logits, tokenizer = facts["logits"], facts["tokenizer"]
    typer.echo(
        f"{out}: {facts['model']} of step {facts['step']}, {facts['dtype']}; logits differ by at most "
        f"{logits['difference']:.2g} of {logits['largest']:.2g}, ids in {tokenizer['different_ids']} of "
        f"{tokenizer['documents']} documents"
    )
    if push_to_hub is not None:
        from pretrain.export.hub import push

        typer.echo(f"pushed: {push(out, push_to_hub, public)}")


def export_on_cpu(run: Path, out: Path, step: int | None, dtype: str | None) -> dict[str, Any]:
    """`export_run` on one process without a GPU, wherever the run was trained."""
    from megatron_patches.engine.compat import silence_expected_warnings
    from pretrain.ranks.devices import ask_for

    silence_expected_warnings()
    ask_for("cpu")
    from pretrain.export.export import export_run
    from pretrain.ranks.single_process import one_process

    with one_process() as context:
        return export_run(run, out, context, step, dtype)


def import_(
    directory: Annotated[Path, typer.Argument(help="A directory of Hugging Face: Starcoder2 or GPT2.")],
    out: Annotated[Path, typer.Option(help="Directory to make; it must not be there yet.")],
    config: Annotated[
        str, typer.Option(help="What the configuration is taken from, but for the model.")
    ] = "small",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value, as often as needed.", metavar="[section.key=value]..."),
    ] = None,
) -> None:
    """Make initial weights and a configuration of a trained model, its Q and K frozen as they are.

    Example: python -m pretrain import exported/orthogonal --out imported --config demo
    """
    from megatron_patches.engine.compat import silence_expected_warnings

    silence_expected_warnings()
    from pretrain.export.importing import CONFIG, WEIGHTS, import_model

    made = import_model(directory, out, config, overrides or [])
    typer.echo(
        f"{out / WEIGHTS}, {out / CONFIG}: {made.model.num_layers} layers of {made.model.hidden_size}; train "
        f"with `python -m pretrain train {out / CONFIG} run.name=NAME data.directory=SHARDS`"
    )
