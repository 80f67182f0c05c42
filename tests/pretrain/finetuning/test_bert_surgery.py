"""What the head-wise test puts into a BERT, and that its proof of what stayed frozen can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_patches.bank.orthonormal import ROLES, head_rows
from pretrain.errors import UserError
from pretrain.finetuning.bert.arms import Arm, Condition, Norm
from pretrain.finetuning.bert.directory import BertDirectory, open_bert
from pretrain.finetuning.bert.experiment import check_heads
from pretrain.finetuning.bert.surgery import bank_recipe, frozen_rows, install
from pretrain.finetuning.frozen_rows import freeze, remember, what_changed
from tests.pretrain.finetuning.tiny_bert import HEAD_DIM, HIDDEN, make_tiny_bert

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> BertDirectory:
    room = tmp_path_factory.mktemp("surgery")
    make_tiny_bert(room)
    return open_bert(room / "bert", 16)


def heads_of(weight: torch.Tensor) -> list[torch.Tensor]:
    return list(weight.detach().double().split(HEAD_DIM))


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("condition", [c for c in Condition if c is not Condition.unfrozen])
def test_what_is_put_into_every_head(bert: BertDirectory, condition: Condition, norm: Norm) -> None:
    before, _ = bert.classifier()
    model, _ = bert.classifier()
    model.load_state_dict(before.state_dict())
    with torch.no_grad():  # a trained BERT has biases
        for one in (before, model):
            one.bert.encoder.layer[1].attention.self.key.bias.fill_(0.5)
    replaced = install(model, Arm(condition, "1"), 7, norm)
    assert [(part["layer"], part["role"]) for part in replaced] == [(1, "query"), (1, "key")]
    recipe = bank_recipe(bert.config, condition, 7)
    for role in ROLES:
        linear = getattr(model.bert.encoder.layer[1].attention.self, role)
        was = getattr(before.bert.encoder.layer[1].attention.self, role)
        if condition is Condition.frozen:
            assert torch.equal(linear.weight, was.weight) and torch.equal(linear.bias, was.bias)
            continue
        assert not linear.bias.any()
        for head, (rows, old) in enumerate(zip(heads_of(linear.weight), heads_of(was.weight), strict=True)):
            drawn = torch.from_numpy(head_rows(recipe, 1, role, head)).double()
            scale = (rows.norm() / HEAD_DIM**0.5) if norm is Norm.match else torch.tensor(1.0)
            error = (rows @ rows.T / scale**2 - torch.eye(HEAD_DIM)).abs().max()
            if norm is Norm.match:
                assert rows.norm() == pytest.approx(float(old.norm()), rel=1e-6)
            elif condition is not Condition.reorthonormalized:
                assert torch.equal(rows.float(), drawn.float())  # the bank's own bits
            assert (error < 1e-6) == (condition is not Condition.gaussian)
            cosine = float((rows * drawn).sum() / rows.norm() / drawn.norm())
            if condition is Condition.reorthonormalized:
                projector = torch.linalg.pinv(old) @ old
                assert (rows.T @ rows / scale**2 - projector).abs().max() < 1e-5  # the same row space
            else:
                assert cosine == pytest.approx(1.0, abs=1e-6)
    untouched = {name for name in before.state_dict() if "layer.1.attention.self" not in name}
    untouched |= {f"bert.encoder.layer.1.attention.self.value.{part}" for part in ("weight", "bias")}
    now = model.state_dict()
    assert all(torch.equal(now[name], before.state_dict()[name]) for name in untouched)


def test_surgery_moves_no_random_number(bert: BertDirectory) -> None:
    """Otherwise arms of one seed would see other dropout, and be no pairs."""
    model, _ = bert.classifier()
    torch.manual_seed(3)
    for condition in Condition:
        install(model, Arm(condition, "all"), 1, Norm.unit)
    after = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(4))


def test_the_proof_fails_where_a_frozen_bit_or_no_head_changes(bert: BertDirectory) -> None:
    model, _ = bert.classifier()
    arm = Arm(Condition.orthonormal, "0")
    install(model, arm, 1, Norm.unit)
    rows = frozen_rows(arm, model.config)
    freeze(model, rows)
    before = remember(model, rows)
    moved = [p for name, p in model.named_parameters() if p.requires_grad and "pooler.dense.bias" not in name]
    with torch.no_grad():
        for parameter in moved:
            parameter.add_(1.0)
        with pytest.raises(UserError, match=r"did not change bert\.pooler\.dense\.bias"):
            check_heads(what_changed(model, rows, before, "classifier."))
        model.bert.pooler.dense.bias.add_(1.0)
        proof = check_heads(what_changed(model, rows, before, "classifier."))
        assert proof["frozen_entries"] == 2 * (HIDDEN * HIDDEN + HIDDEN) and proof["pooler_changed"]
        model.bert.encoder.layer[0].attention.self.key.bias[3] += 1e-30
        with pytest.raises(RuntimeError, match="frozen rows"):
            what_changed(model, rows, before, "classifier.")


def test_a_directory_as_the_hub_has_it_is_read(tmp_path: Path) -> None:
    """bert-base-uncased: TensorFlow's names of the norms, heads of pretraining, a pooler, vocab.txt alone."""
    make_tiny_bert(tmp_path)
    directory = tmp_path / "bert"
    own = open_bert(directory, 16).tokenizer
    ids, vocabulary = own("the film is lovely")["input_ids"], own.get_vocab()
    weights = load_file(directory / "model.safetensors")
    old = {".weight": ".gamma", ".bias": ".beta"}
    for name in [name for name in weights if "LayerNorm" in name]:
        stem, _, part = name.rpartition(".")
        weights[stem + old[f".{part}"]] = weights.pop(name) + 0.25
    weights["bert.pooler.dense.weight"] = torch.eye(HIDDEN)
    weights["bert.pooler.dense.bias"] = torch.ones(HIDDEN)
    weights["cls.seq_relationship.weight"] = torch.zeros(2, HIDDEN)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.txt").write_text(
        "".join(f"{p}\n" for p in sorted(vocabulary, key=vocabulary.__getitem__))
    )
    (directory / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 512}')

    bert = open_bert(directory, 16)
    model, made_anew = bert.classifier()
    assert made_anew == ["classifier.bias", "classifier.weight"]
    assert torch.equal(model.bert.pooler.dense.weight, torch.eye(HIDDEN))
    assert torch.equal(model.bert.encoder.layer[1].output.LayerNorm.weight, torch.full((HIDDEN,), 1.25))
    assert bert.tokenizer("The film is LOVELY")["input_ids"] == ids
