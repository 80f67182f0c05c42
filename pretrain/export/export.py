"""Export of a run's model to a Hugging Face directory: weights, tokenizer, card, compared logits.

    with one_process() as context:
        facts = export_run(Path("runs/orthogonal"), Path("exported"), context)

The files are written to a temporary directory, which is renamed when the export is complete.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

import pretrain
from data_pipeline.io.files import hash_file, write_json, write_text_atomically
from data_pipeline.io.words import shown
from megatron_patches.recipe.counting import count_parameters
from pretrain.checkpoint.format import marker_digest
from pretrain.export.agreement import (
    LogitAgreement,
    compare_logits,
    held_out_tokens,
    own_logits,
    require_agreement,
)
from pretrain.export.architectures import Architecture, architecture_of
from pretrain.export.card import model_card
from pretrain.export.directories import made_beside, refuse_existing
from pretrain.export.models import CHECKPOINT_FACT, FACTS, FILES_FACT, require_transformers
from pretrain.export.names import OWN_CODE
from pretrain.export.projections import folded_adapters
from pretrain.export.tokenizer import compare_tokenizers, write_tokenizer
from pretrain.export.trained_run import TrainedRun, load_model, open_trained_run
from pretrain.export.weight_files import write_weights
from pretrain.model.build import DTYPES
from pretrain.ranks.groups import ParallelContext
from pretrain.reporting.text import perplexity
from pretrain.runs.environment import package_version

PACKAGES = ("transformers", "tokenizers", "safetensors")
"""Packages whose versions export.json states, beside torch's."""
ALLOWED, ALLOWED_ROUNDED = 1e-4, 0.1
"""Allowed difference of a logit, relative to the largest; the second where weights are rounded to
bf16."""


def export_run(
    path: Path,
    out: Path,
    context: ParallelContext,
    step: int | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Export a run's model.

    Args:
        step: Step of the checkpoint; None: the newest one.
        dtype: fp32 or bf16; None: the run's own, but fp32 where adapters are folded into other
            weights or factors are multiplied out.

    Returns:
        The content of export.json.

    Raises:
        UserError: transformers is missing, `out` exists, no class of transformers computes this
            model, the checkpoint is damaged or another run's, or the exported model's logits
            differ.
        DataError: the shards that config.yaml names are missing.
    """
    require_transformers("export")
    refuse_existing(out)
    run = open_trained_run(path, step)
    architecture = architecture_of(run.config)
    # Taken first: if the checkpoint is written again meanwhile, the export counts as outdated.
    checkpoint_digest = marker_digest(run.checkpoint)
    with made_beside(out) as directory:
        model = load_model(run, context)
        folded = _folded_adapters(run, model)
        trained_in = run.config.precision.dtype
        same_bits = _keeps_bits(run, folded)
        dtype = dtype or (trained_in if same_bits else "fp32")
        weight_bytes = write_weights(
            directory / "model.safetensors", list(architecture.weights(model)), DTYPES[dtype]
        )
        _write_settings(run, architecture, dtype, directory)
        tokens = held_out_tokens(run)
        run_logits = own_logits(model, tokens, run.config.model.vocab_size)
        # The two models may not fit into memory together.
        del model
        logits = compare_logits(directory, tokens, run_logits, custom=architecture.custom)
        rounded = dtype == "bf16" and not (same_bits and trained_in == "bf16")
        require_agreement(logits, (ALLOWED_ROUNDED if rounded else ALLOWED) * logits.largest)
        facts = {
            **_facts(run, architecture, dtype, folded=folded, logits=logits),
            "weight_bytes": weight_bytes,
            "tokenizer": asdict(
                compare_tokenizers(run.blend.manifests, directory, architecture.custom)
            ),
            CHECKPOINT_FACT: checkpoint_digest,
        }
        write_text_atomically(directory / "README.md", shown(model_card(facts, out.name)))
        facts[FILES_FACT] = {path.name: hash_file(path) for path in sorted(directory.iterdir())}
        write_json(directory / FACTS, facts)
    return facts


def _write_settings(
    run: TrainedRun, architecture: Architecture, dtype: str, directory: Path
) -> None:
    """Write config.json, generation_config.json, the tokenizer, and the export's own code."""
    eod_id, length = run.blend.eod_id, run.config.data.sequence_length
    type_name = str(DTYPES[dtype]).removeprefix("torch.")
    write_json(directory / "config.json", architecture.config_json(eod_id, type_name))
    ids = {"bos_token_id": eod_id, "eos_token_id": eod_id, "pad_token_id": eod_id}
    write_json(directory / "generation_config.json", ids)
    write_tokenizer(run.blend.manifests[0], directory, length)
    if architecture.custom:
        shutil.copyfile(OWN_CODE, directory / OWN_CODE.name)


def _folded_adapters(run: TrainedRun, model: GPTModel) -> list[str]:
    """Return the names of the adapters that were folded into rows, which thereby leave the bank."""
    folded = {
        name
        for layer in model.decoder.layers
        for name in folded_adapters(layer.self_attention.linear_qkv)
    }
    return [adapter.name for adapter in run.config.policy.corrections if adapter.name in folded]


def _keeps_bits(run: TrainedRun, folded: list[str]) -> bool:
    """Return whether every weight can be stored with the bits it was trained with.

    The products of two bf16 factors need more digits.
    """
    policy = run.config.policy
    multiplied = policy.structured and run.config.precision.dtype == "bf16"
    return not (folded or multiplied or "channel_scale" in policy.adapters)


def _facts(
    run: TrainedRun,
    architecture: Architecture,
    dtype: str,
    folded: list[str],
    logits: LogitAgreement,
) -> dict[str, Any]:
    """Return the facts of export.json about the weights: origin, frozen rows, agreement."""
    config, loss = run.config, run.validation_loss
    phase = config.phase_at(run.step).number
    count = count_parameters(config.shape, config.policy, phase)
    sizes = config.model.num_layers, config.num_query_groups
    fixed = config.policy.fixed_groups(*sizes, phase)
    keeps = config.policy.kept_from(*sizes)
    ranges = [architecture.row_ranges(layer, groups) for layer, groups in enumerate(fixed)]
    return {
        "ora_pretrain": pretrain.__version__,
        "packages": {
            "torch": torch.__version__,
            **{name: package_version(name) for name in PACKAGES},
        },
        "run": config.run.name,
        "variant": config.attention.variant,
        "attention": config.as_dict()["attention"],
        "seed": config.run.seed,
        "step": run.step,
        "tokens": run.record.get("tokens"),
        "validation_loss": loss,
        "validation_perplexity": None if loss is None else perplexity(loss),
        "parameters": {"trainable": count.trainable, "frozen": count.frozen},
        "sequence_length": config.data.sequence_length,
        "data": {
            "fingerprint": run.blend.fingerprint,
            "names": sorted({manifest.name for manifest in run.blend.manifests}),
            "sources": sorted({s for m in run.blend.manifests for s in m.sources("train")}),
        },
        "model": architecture.class_name,
        "custom_code": architecture.custom,
        "own_parts": dict(architecture.parts),
        "dtype": dtype,
        "frozen_bank": dict(run.frozen_bank),
        "frozen": {
            "drawn": any(config.policy.frozen_groups(*sizes, phase)),
            "as_trained": any(since is not None and since <= phase for since in keeps),
        },
        "frozen_rows": {name: ranges_of for layer in ranges for name, ranges_of in layer.items()},
        "folded": folded,
        "logits": asdict(logits),
    }
