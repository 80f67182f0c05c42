"""Rank functions of test_import.py: models of transformers, imported, built and trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data_pipeline.tokenizer.tokenizer import read_model
from pretrain.checkpoint.identity import bank_digests
from pretrain.config.load import load_config
from pretrain.errors import UserError
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

SIZES = {"vocab_size": 512, "tie_word_embeddings": False}
PADDED = 612


def import_all(payload: dict[str, Any]) -> dict[str, Any]:
    """On one rank: a run exported and imported; models that transformers made; what is refused."""
    root = Path(payload["root"])
    found: dict[str, Any] = {"source": train(load_config("demo", payload["source"]), StopSignals())}
    with one_process() as context:
        export_run(root / "source", root / "export", context)
        config = import_model(root / "export", root / "imported", "demo", payload["overrides"])
        found["bank"] = bank_digests(build_model(config, context), context)
        for name in STOCK:
            stock(name, root / name)
            import_model(root / name, root / f"{name}-imported", "demo", payload["overrides"])
            for variant in ("pretrained", "vanilla"):
                found[f"{name} {variant}"] = _difference(root, name, variant, context)
        import_model(root / "starcoder2", root / "other", "demo", payload["overrides"])
        found["padded"] = _padded(root, payload, context)
        found["refusals"] = {name: _refusal(root, name) for name in REFUSED}
    return found


def train_all(payload: dict[str, Any]) -> list[str]:
    """Final state of every run of a configuration of its own, or why it was refused."""
    return [state_of(overrides, config) for config, overrides in payload["runs"]]


ROTARY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
LEARNED: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 48,
    "activation_function": "gelu",
}
STOCK: dict[str, dict[str, Any]] = {
    "starcoder2": {**ROTARY, "hidden_act": "gelu", "use_bias": False},
    "gpt2": LEARNED,
    "llama": {**ROTARY, "rms_norm_eps": 1e-3},
    "qwen3": {**ROTARY, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
}
"""{model type: its configuration}."""


def stock(name: str, directory: Path, **changes: Any) -> None:
    """A model with random weights as transformers itself makes and saves it."""
    torch.manual_seed(len(name))
    settings = {**SIZES, "initializer_range": 0.2, **STOCK[name], **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings))
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
    own = own_logits(build_model(config, context).eval(), tokens, config.model.vocab_size)
    theirs = AutoModelForCausalLM.from_pretrained(root / name).eval()
    with torch.no_grad():
        logits = theirs(tokens).logits
    assert own.shape == logits.shape and float(logits.std()) > 0.3
    return float((own - logits).abs().max())


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


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "activation": ("gpt2", {"activation_function": "gelu_new"}),
    "window": ("starcoder2", {"sliding_window": 16}),
    "scaled": (
        "starcoder2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "bias": ("starcoder2", {"use_bias": True}),
    "llama bias": ("llama", {"attention_bias": True}),
    "llama scaled": ("llama", {"rope_parameters": LLAMA3}),
    "qwen3 window": ("qwen3", {"use_sliding_window": True, "sliding_window": 16}),
    "qwen3 layers": ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}),
    "exists": ("gpt2", {}),
    "type": ("gpt2", {}),
    "shape": ("gpt2", {}),
    "silent": ("starcoder2", {}),
    "no weights": ("starcoder2", {}),
}


def _refusal(root: Path, case: str) -> str:
    name, changes = REFUSED[case]
    directory = root / f"refused-{case}"
    out = root / f"refused-{case}-imported"
    stock(name, directory, **changes)
    config = json.loads((directory / "config.json").read_text())
    if case.endswith("bias"):
        from safetensors.torch import load_file, save_file

        weights = load_file(directory / "model.safetensors")
        place = "mlp.c_fc" if name == "starcoder2" else "self_attn.q_proj"
        weights[f"model.layers.1.{place}.bias"][3] = 1e-3
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    elif case == "exists":
        out.mkdir()
    elif case == "type":
        config["model_type"] = "mistral"
    elif case == "shape":
        config["n_inner"] = 96
    elif case == "silent":
        del config["num_hidden_layers"]
    elif case == "no weights":
        (directory / "model.safetensors").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    try:
        import_model(directory, out, "demo", [])
    except UserError as error:
        assert case == "exists" or not out.exists()
        return str(error)
    return "not refused"
