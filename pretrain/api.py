"""The public Python interface: docs/api.md shows each name with an example.

    from pretrain.api import FrozenAttention, compare, load_run

These names stay as they are within a version 0.x; everything else in the packages may change.
Importing this module imports neither megatron-core nor DeepSpeed, and torch only for
`FrozenAttention`, `bank_rows` or `samples`. A mistake of the caller raises one sentence, as a
`pretrain.errors.UserError` or a `megatron_patches.errors.MethodError`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from data_pipeline.io.home import expand_home
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.recipe.variants import ORDINARY
from pretrain.errors import UserError

if TYPE_CHECKING:
    from laboratory.api import FinishedRun, compare, compare_losses, load_run, paired_gaps
    from megatron_patches.attention.module import FrozenAttention
    from megatron_patches.bank.shards import bank_rows
    from pretrain.data.dataset import Samples
    from pretrain.plan.estimate import Plan

__all__ = [
    "BankRecipe",
    "FinishedRun",
    "FrozenAttention",
    "bank_rows",
    "compare",
    "compare_losses",
    "export",
    "load_run",
]
__all__ += ["paired_gaps", "plan", "sample", "samples", "tokenize"]

AnyPath = str | os.PathLike[str]
_LATER = {
    "FrozenAttention": "megatron_patches.attention.module",
    "bank_rows": "megatron_patches.bank.shards",
    "FinishedRun": "laboratory.api",
    "compare": "laboratory.api",
    "compare_losses": "laboratory.api",
    "load_run": "laboratory.api",
    "paired_gaps": "laboratory.api",
}
"""{name: its module, which is imported at the first use of the name}"""


def __getattr__(name: str) -> Any:
    """Import the names that need torch, or packages of an extra."""
    if name not in _LATER:
        raise AttributeError(f"module 'pretrain.api' has no attribute '{name}'")
    return getattr(import_module(_LATER[name]), name)


def plan(
    config: AnyPath,
    overrides: Sequence[str] = (),
    gpus: int = 8,
    gpu: str = "a100-80gb",
    baseline: str = ORDINARY,
    price: float | None = None,
) -> Plan:
    """Estimate memory, time, energy and cost of a run, as the verb `plan` does.

    Builds no model.

    Args:
        config: A shipped configuration, or a YAML file.
        overrides: section.key=value.
        gpus: GPUs in all, one rank each.
        gpu: Name of a card, or a file that describes one.
        baseline: Variant of the second estimate.
        price: Price of a GPU for an hour; None: no cost.
    """
    from pretrain.plan.estimate import Request, make_plan

    request = Request(
        config=os.fspath(config),
        overrides=tuple(overrides),
        gpus=gpus,
        gpu=gpu,
        baseline=baseline,
        price=price,
    )
    return make_plan(request)


def tokenize(
    data: Any,
    tokenizer: AnyPath,
    out: AnyPath,
    name: str = "data",
    *,
    workers: int = 1,
    text_key: str = "text",
    source_key: str = "meta.redpajama_set_name",
    default_source: str = "default",
    validation_fraction: float = 0.05,
    test_fraction: float = 0.0,
    max_reject_rate: float = 0.01,
) -> dict[str, Any]:
    """Make a shard directory, as the verb `tokenize` does; the same call again continues it.

    Args:
        data: A Dataset or IterableDataset of `datasets`, an iterable of texts, or what the verb
            takes: a file, a directory, or a data set's name.
        tokenizer: SentencePiece model or tokenizer.json.
        out: The shard directory.
        name: First part of the shards' names.
        workers: Processes.
        text_key: Column of the text.
        source_key: Column of the source's name.
        default_source: Source of the documents that name none.
        validation_fraction: Share of the documents to hold out.
        test_fraction: Share of the documents to set aside for a final test.
        max_reject_rate: Largest share of the rows that may be no documents.

    Returns:
        The content of manifest.json.

    Raises:
        UserError: an option, the tokenizer or the data cannot be used.
    """
    from data_pipeline.errors import DataError
    from data_pipeline.io.files import read_json
    from data_pipeline.shards.manifest import MANIFEST_NAME
    from data_pipeline.sources.discovery import RecordKeys
    from data_pipeline.tokenizing.plan import TokenizeOptions
    from data_pipeline.tokenizing.rejects import Limits
    from data_pipeline.tokenizing.run import tokenize_data

    try:
        options = TokenizeOptions(
            name=name,
            validation_fraction=validation_fraction,
            keys=RecordKeys(text_key, source_key, default_source),
            test_fraction=test_fraction,
        )
        directory = expand_home(out)
        manifest = tokenize_data(
            data,
            expand_home(tokenizer),
            directory,
            options=options,
            workers=workers,
            limits=Limits(max_reject_rate=max_reject_rate),
        )
        for damage in manifest.damaged:
            warnings.warn(f"damaged input {damage}", stacklevel=2)
        return read_json(directory / MANIFEST_NAME)
    except DataError as error:
        raise UserError(str(error)) from error


def samples(directory: AnyPath, sequence_length: int | None = None, seed: int = 0) -> Samples:
    """Open training samples as a `torch.utils.data.Dataset`, in the order of a run.

    Args:
        directory: A run, whose samples are all that it takes from first to last step; or a shard
            directory, whose samples are those of an epoch.
        sequence_length: Tokens that a sample predicts; of a run, its own.
        seed: Seed of the order; of a run, its own.

    Returns:
        Samples `[sequence_length + 1]`, int64.

    Raises:
        UserError: there are no such shards, they are not the run's, or the length is missing.
    """
    from data_pipeline.errors import DataError
    from pretrain.data.dataset import samples_of_run, samples_of_shards
    from pretrain.runs.directory import RunDirectory

    path = expand_home(directory)
    try:
        if RunDirectory(path).config.is_file():
            return samples_of_run(path)
        if sequence_length is None:
            raise UserError(f"{path} is not a run: give the sequence_length of its samples")
        return samples_of_shards(path, sequence_length, seed)
    except DataError as error:
        raise UserError(str(error)) from error


def export(
    run: AnyPath, out: AnyPath, step: int | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Export a run's model for transformers to a new directory, in another process.

    Args:
        run: Directory of the run.
        out: The new directory.
        step: Step of the checkpoint; None: the newest complete one.
        dtype: fp32 or bf16; None: the run's own.

    Returns:
        The content of export.json.
    """
    from pretrain.export.models import FACTS
    from pretrain.export.run_exports import export_apart
    from pretrain.runs.facts import read_facts

    export_apart(expand_home(run), expand_home(out), step, dtype)
    return read_facts(expand_home(out) / FACTS)


def sample(
    path: AnyPath,
    prompt: str = "",
    tokens: int = 100,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
) -> str:
    """Write text with a trained model.

    Args:
        path: A run, which is exported once per checkpoint, or an export without code of its own.
        prompt: Text to continue.
        tokens: Number of tokens to add.
        temperature: Divisor of the logits; 0 always takes the likeliest token.
        top_p: Total probability of the tokens that are drawn from.
        seed: Seed of the draws.
        step: Step of the checkpoint; None: the newest complete one.

    Returns:
        The text after the prompt.
    """
    from pretrain.export.run_exports import exported
    from pretrain.export.sampling import Sampler, Sampling

    directory = exported(expand_home(path), step)
    sampler = Sampler(directory, trust_code=directory != expand_home(path))
    return sampler.text(prompt, Sampling(tokens, temperature, top_p, seed))
