"""Rank functions of test_export.py: train under a layout.

Export on one rank, and look at the files.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from data_pipeline.errors import DataError
from megatron_patches.errors import MethodError
from pretrain.errors import UserError
from pretrain.export.agreement import compare_logits, held_out_tokens, own_logits
from pretrain.export.export import export_run
from pretrain.export.trained_run import load_model, open_trained_run
from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.single_process import one_process
from tests.distributed.workers.runs import train_all


def export_all(payload: dict[str, Any]) -> dict[str, Any]:
    """On one rank: train its runs, then {name: export.json, or the refusal} of every export."""
    states = train_all(payload)
    out = Path(payload["out"])
    reports: dict[str, Any] = {"states": states}
    with one_process() as context:
        for name, (run, options) in payload["exports"].items():
            reports[name] = _export(Path(run), out / name, context, options)
        reports["bits"] = _equal_bits(Path(payload["bf16"]), out, context)
        reports["swapped"] = _swapped_heads(Path(payload["run"]), out, context)
        reports["spoilt"] = _spoilt(Path(payload["run"]), out, context)
    return reports


def harness_scores(payload: dict[str, Any]) -> list[tuple[float, float]]:
    """Log-likelihoods of texts, from lm-eval on an export and from the run's own model."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    texts = [("Return the", " value of x"), ("def f(x):", "\n    return x"), ("Note", " that")]
    requests = [Instance("loglikelihood", {}, text, 0) for text in texts]
    harness = HFLM(pretrained=payload["export"], device="cpu", dtype="float32", batch_size=2)
    theirs = [score for score, _ in harness.loglikelihood(requests)]
    encode = AutoTokenizer.from_pretrained(payload["export"])
    ours = []
    with one_process() as context, torch.no_grad():
        run = open_trained_run(Path(payload["run"]))
        model = load_model(run, context).float()
        for prompt, after in texts:
            ids = torch.tensor(encode(prompt + after)["input_ids"])
            positions = torch.arange(len(ids) - 1)[None]
            logits = model(ids[None, :-1], positions, None)[0, :, : run.config.model.vocab_size]
            likelihoods = torch.log_softmax(logits.double(), -1).gather(1, ids[1:, None])
            ours.append(float(likelihoods[len(encode(prompt)["input_ids"]) - 1 :].sum()))
    return list(zip(theirs, ours, strict=True))


def _export(run: Path, out: Path, context: ParallelContext, options: dict[str, Any]) -> Any:
    try:
        return export_run(run, out, context, **options)
    except (UserError, DataError, MethodError) as error:
        return str(error)


def _equal_bits(run: Path, out: Path, context: ParallelContext) -> dict[str, bool]:
    """Return for each kind of weight whether an export of a bf16 run has the checkpoint's bits."""
    model = load_model(open_trained_run(run), context)
    stored = load_file(out / run.name / "model.safetensors")
    attention = model.decoder.layers[1].self_attention
    fused = attention.linear_qkv.weight.view(4, 3, 8, 32)  # per head: q, k, v
    pairs = {
        "embedding": ("model.embed_tokens.weight", model.embedding.word_embeddings.weight),
        "query": ("model.layers.1.self_attn.q_proj.weight", fused[:, 0].flatten(0, 1)),
        "value": ("model.layers.1.self_attn.v_proj.weight", fused[:, 2].flatten(0, 1)),
        "norm": ("model.norm.bias", model.decoder.final_layernorm.bias),
    }
    return {
        kind: stored[name].dtype == torch.bfloat16 and torch.equal(stored[name], ours)
        for kind, (name, ours) in pairs.items()
    }


def _swapped_heads(run: Path, out: Path, context: ParallelContext) -> float:
    """Return the logits' error after two query heads of one layer of the export were swapped."""
    from safetensors.torch import save_file

    opened = open_trained_run(run)
    tokens = held_out_tokens(opened)
    logits = own_logits(load_model(opened, context), tokens, opened.config.model.vocab_size)
    shutil.copytree(out / run.name, out / "swapped")
    file = out / "swapped/model.safetensors"
    weights = load_file(file)
    rows = weights["model.layers.1.self_attn.q_proj.weight"]
    weights["model.layers.1.self_attn.q_proj.weight"] = rows.view(4, 8, 32).flip(0).reshape(32, 32)
    save_file(weights, file, metadata={"format": "pt"})
    return compare_logits(out / "swapped", tokens, logits, custom=False).difference


def _spoilt(run: Path, out: Path, context: ParallelContext) -> dict[str, Any]:
    """Return export's refusals of copies of a run with another bank or base of the rotation."""
    refusals = {}
    changes = {
        "bank": ("  seed: 1234\n  gaussian_std:", "  seed: 1235\n  gaussian_std:"),
        "config": ("rotary_base: 10000", "rotary_base: 20000"),
    }
    for name, change in changes.items():
        spoilt = out / f"run-{name}"
        shutil.copytree(run, spoilt)
        text = (spoilt / "config.yaml").read_text()
        assert change[0] in text
        (spoilt / "config.yaml").write_text(text.replace(*change))
        refusals[name] = _export(spoilt, out / f"of-{name}", context, {})
    return refusals
