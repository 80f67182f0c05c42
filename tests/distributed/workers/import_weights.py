"""Rank functions of test_import.py: models of transformers, imported, built and trained here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from data_pipeline.tokenizer.tokenizer import read_model
from pretrain.checkpoint.identity import bank_digests
from pretrain.config.load import load_config
from pretrain.export.agreement import own_logits
from pretrain.export.export import export_run
from pretrain.export.source_model import import_model
from pretrain.export.tokenizer import converted
from pretrain.model.build import build_model
from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.signals import StopSignals
from pretrain.ranks.single_process import one_process
from pretrain.training.loop import train
from tests.distributed.workers.runs import state_of
from tests.tiny_exports import LEARNED, ROTARY, model_of

SIZES = {"vocab_size": 512, "tie_word_embeddings": False}
PADDED = 612


def import_all(payload: dict[str, Any]) -> dict[str, Any]:
    """On one rank: a run exported and imported; models that transformers made."""
    root = Path(payload["root"])
    facts: dict[str, Any] = {"source": train(load_config("demo", payload["source"]), StopSignals())}
    with one_process() as context:
        export_run(root / "source", root / "export", context)
        config = import_model(root / "export", root / "imported", "demo", payload["overrides"])
        facts["bank"] = bank_digests(build_model(config, context), context)
        for name in STOCK:
            stock(name, root / name)
            import_model(root / name, root / f"{name}-imported", "demo", payload["overrides"])
            for variant in ("pretrained", "vanilla"):
                facts[f"{name} {variant}"] = _difference(root, name, variant, context)
        stock("qwen3", root / "other", initializer_range=0.1)
        import_model(root / "other", root / "other-imported", "demo", payload["overrides"])
        facts["padded"] = _padded(root, payload, context)
    return facts


def train_all(payload: dict[str, Any]) -> list[str]:
    """Final state of every run of a configuration of its own, or why it was refused."""
    return [state_of(overrides, config) for config, overrides in payload["runs"]]


GROUPED = {
    **ROTARY,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
STOCK: dict[str, dict[str, Any]] = {
    "starcoder2": {**GROUPED, "hidden_act": "gelu", "use_bias": False},
    "gpt2": {**LEARNED, "n_positions": 48, "activation_function": "gelu"},
    "llama": {**GROUPED, "rms_norm_eps": 1e-3},
    "qwen3": {**GROUPED, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
}
"""{model type: its configuration}."""


def stock(name: str, directory: Path, **changes: Any) -> None:
    """A model with random weights as transformers itself makes and saves it."""
    torch.manual_seed(len(name))
    model = model_of(name, **{**SIZES, "initializer_range": 0.2, **STOCK[name], **changes})
    for parameter in model.parameters():
        if parameter.dim() == 1 and (parameter == 1).all():  # the norms' weights, which start at 1
            parameter.data.normal_(1, 0.3)
    model.save_pretrained(directory)
    if name == "gpt2":  # as in older checkpoints, where the causal mask is among the weights
        from safetensors.torch import load_file, save_file

        weights = load_file(directory / "model.safetensors")
        weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.bool).tril()
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _difference(root: Path, name: str, variant: str, context: ParallelContext) -> float:
    """Largest |difference| of a logit between what was imported and transformers' own."""
    config = load_config(
        str(root / f"{name}-imported/config.yaml"), [f"attention.variant={variant}"]
    )
    tokens = torch.arange(96).view(2, 48) * 5
    ours = own_logits(build_model(config, context).eval(), tokens, config.model.vocab_size)
    theirs = AutoModelForCausalLM.from_pretrained(root / name).eval()
    with torch.no_grad():
        logits = theirs(tokens).logits
    assert ours.shape == logits.shape and float(logits.std()) > 0.3
    return float((ours - logits).abs().max())


def _padded(root: Path, payload: dict[str, Any], context: ParallelContext) -> dict[str, Any]:
    """A Qwen3 with 100 rows above the ids of its tokenizer, which lies beside it or does not."""
    stock("qwen3", root / "padded", vocab_size=PADDED)
    import_model(root / "padded", root / "bare-imported", "demo", payload["overrides"])
    model = Path(payload["tokenizer"])
    converted(read_model(model), model).save(str(root / "padded/tokenizer.json"))
    # More rows than the file has, and fewer.
    overrides = [*payload["overrides"], "model.vocab_multiple=640"]
    config = import_model(root / "padded", root / "padded-imported", "demo", overrides)
    tokens = torch.arange(48)[None] * 5
    with torch.no_grad():
        logits = build_model(config, context).eval()(tokens, None, None)[0]
        theirs = AutoModelForCausalLM.from_pretrained(root / "padded").eval()(tokens).logits[0]
    return {
        "tokens": config.model.vocab_size,
        "rows": config.embedding_rows,
        "difference": float((logits[:, :512] - theirs[:, :512]).abs().max()),
        "largest above": float(logits[:, 512:].max()),
    }
