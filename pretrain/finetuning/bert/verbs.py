"""Verb `evaluate bert-reservoir`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pretrain.finetuning.bert.arms import Norm, arms, find_conditions, layers_of


def bert_reservoir(
    model: Annotated[Path, typer.Option(help="A directory of Hugging Face with a BERT and its tokenizer.")],
    train: Annotated[
        Path, typer.Option(help="Examples as SST-2 has them, sentence and label 0 or 1: TSV, JSONL, parquet.")
    ],
    validation: Annotated[Path, typer.Option(help="Examples of the same form that are only judged.")],
    out: Annotated[Path, typer.Option(help="Directory for the report; the same again goes on.")] = Path(
        "evaluation/bert-reservoir"
    ),
    conditions: Annotated[
        str, typer.Option(help="Beside unfrozen, which is the baseline and always there.")
    ] = "frozen,orthonormal,gaussian,reorthonormalized",
    layers: Annotated[
        list[str] | None,
        typer.Option(help="4, 4-7, 50%-100%; default: all; repeatable, every condition with each."),
    ] = None,
    norm: Annotated[
        Norm, typer.Option(help="unit: rows of length 1; match: each head with the norm of what it replaces.")
    ] = Norm.unit,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 1 … this; 5 at least for a claim.")] = 5,
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak, of every arm.")] = 2e-5,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    warmup: Annotated[float, typer.Option(min=0, max=0.99, help="Part of the steps.")] = 0.1,
    max_length: Annotated[int, typer.Option(min=4, help="Pieces of an example.")] = 128,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Criterion: largest relative loss to the baseline's accuracy.")
    ] = 0.05,
) -> None:
    """Fine-tune a BERT whose queries and keys are replaced by frozen orthonormal rows, beside controls.

    Example: python -m pretrain evaluate bert-reservoir --model bert --train train.tsv --validation dev.tsv
    """
    from pretrain.finetuning.packages import require_packages

    require_packages("evaluate bert-reservoir", "accelerate", "sklearn")
    from pretrain.finetuning.bert.directory import open_bert
    from pretrain.finetuning.bert.experiment import ReservoirTest, run_test
    from pretrain.finetuning.bert.report import reservoir_report
    from pretrain.finetuning.training import Settings
    from pretrain.reporting.progress import WorkDisplay
    from pretrain.study.report import finish

    settings = Settings(learning_rate, epochs, batch_size, warmup, patience=0)
    bert = open_bert(model, max_length)
    ranges = layers or ["all"]
    for text in ranges:
        layers_of(text, bert.config.num_hidden_layers)
    test = ReservoirTest(bert, train, validation, settings, norm, max_length)
    chosen = arms(find_conditions(conditions), ranges)
    with WorkDisplay(len(chosen) * seeds) as work:
        results = run_test(test, chosen, range(1, seeds + 1), out, work.begin)
    finish(reservoir_report(test, results, tolerance), out)
