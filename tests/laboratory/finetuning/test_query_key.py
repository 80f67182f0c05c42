"""Query and key rows of models of transformers: named, replaced, frozen bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    RobertaConfig,
)

from laboratory.finetuning.query_key import all_rows, freeze, query_key, replace_rows, rows_of
from megatron_patches.bank.orthonormal import BankRecipe, rows_of_heads
from pretrain.errors import UserError

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LONG = {"intermediate_size": 64, "max_position_embeddings": 32, "pad_token_id": 0}


def classifier(name: str) -> Any:
    configs = {
        "bert": lambda: BertConfig(**SIZES, **LONG),
        "roberta": lambda: RobertaConfig(**SIZES, **LONG),
        "distilbert": lambda: DistilBertConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4),
        "llama": lambda: LlamaConfig(**SIZES, **LONG, num_key_value_heads=2),
        "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, pad_token_id=0),
        "neox": lambda: GPTNeoXConfig(**SIZES, **LONG),
    }
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(configs[name]())


def frozen_share(config: Any) -> float:
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    total = sum(weight.numel() for weight in model.parameters())
    frozen = sum(
        len(projection.heads) * (projection.heads[0][1] - projection.heads[0][0]) * (inputs + 1)
        for projection in query_key(model)
        for inputs in [rows_of(projection.module).size(1)]
    )
    return frozen / total


def test_an_eighth_of_bert_base_is_frozen() -> None:
    """14.17 M of 109.48 M, biases included."""
    assert f"{100 * frozen_share(BertConfig()):.1f}" == "12.9"


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "llama", "gpt2", "neox"])
def test_a_step_of_adamw_leaves_frozen_rows_and_moves_the_others(name: str) -> None:
    model = classifier(name).train()
    projections = query_key(model)
    assert [(query_or_key.role, query_or_key.layer) for query_or_key in projections].count(
        ("query", 1)
    ) == 1
    key_heads = 2 if name == "llama" else 4
    assert {(query_or_key.role, len(query_or_key.heads)) for query_or_key in projections} == {
        ("query", 4),
        ("key", key_heads),
    }
    initial = {key: value.detach().clone() for key, value in model.named_parameters()}
    frozen = freeze(model, all_rows(projections))
    training = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(training, lr=0.1, weight_decay=0.0)
    ids = torch.arange(1, 21)[None]
    for _ in range(2):
        model(ids, labels=torch.tensor([1])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    frozen.check()
    changed = {key for key, value in model.named_parameters() if not value.equal(initial[key])}
    fused = name in ("gpt2", "neox")
    for projection in projections:
        assert (f"{projection.name}.weight" in changed) == fused  # by its values alone
    values = {"gpt2": (64, 96), "neox": (16, 24)}
    if fused:
        first, end = values[name]
        weight = f"{projections[0].name}.weight"
        ours = rows_of(projections[0].module)
        theirs = initial[weight].T if name == "gpt2" else initial[weight]
        assert not ours[first:end].equal(theirs[first:end])
    with torch.no_grad():
        rows_of(projections[0].module)[0, 0] += 1e-3
    with pytest.raises(RuntimeError, match="frozen rows of queries and keys changed"):
        frozen.check()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "neox"])
def test_replaced_rows_are_the_bank_s(name: str) -> None:
    model = classifier(name)
    projections = query_key(model)
    for projection in projections:
        if projection.module.bias is not None:  # of a new model it is 0
            torch.nn.init.ones_(projection.module.bias)
    replace_rows(projections, 7, "head")
    groups = 2 if name == "llama" else 4
    recipe = BankRecipe(7, 32, 8, num_attention_heads=4, num_query_groups=groups)
    for projection in projections:
        weight = rows_of(projection.module).numpy()
        for number, (first, end) in enumerate(projection.heads):
            expected = rows_of_heads(recipe, projection.layer, projection.role, [number])
            np.testing.assert_array_equal(weight[first:end], expected.astype(np.float32))
            if projection.module.bias is not None:
                assert not projection.module.bias[first:end].any()


def test_one_matrix_is_orthonormal_over_all_heads() -> None:
    projections = query_key(classifier("bert"))
    replace_rows(projections, 7, "layer")
    rows = rows_of(projections[0].module)
    torch.testing.assert_close(rows @ rows.T, torch.eye(32), atol=1e-6, rtol=0)
    replace_rows(projections, 7, "head")
    rows = rows_of(projections[0].module)
    assert (rows @ rows.T - torch.eye(32)).abs().max() > 0.1


def test_what_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"Linear has no modules that are known as projections"):
        model = torch.nn.Linear(2, 2)
        model.config = BertConfig()  # type: ignore[assignment]
        query_key(model)
    model = classifier("bert")
    with pytest.raises(UserError, match=r"layer.9.query.weight is to be frozen, but the model has"):
        freeze(model, {"layer.9.query.weight": [[0, 32]]})
    name = "bert.encoder.layer.0.attention.self.query.weight"
    with pytest.raises(UserError, match=r"rows 16 to 48 of .* are to be frozen, but it has 32"):
        freeze(model, {name: [[16, 48]]})
