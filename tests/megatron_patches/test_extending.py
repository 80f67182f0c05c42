"""docs/extending.md followed to the letter: its adapter and variant work in model and plan."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patches.attention import adapters as formulas
from megatron_patches.recipe import adapters as declarations
from megatron_patches.recipe import variants
from pretrain.config.load import load_config
from pretrain.errors import UserError
from pretrain.export.architectures import architecture_of
from pretrain.plan.estimate import Request, make_plan
from tests.megatron_patches.models import HEADS, HIDDEN, SEQ, build
from tests.ranks import ROOT

PAGE = (ROOT / "docs/extending.md").read_text()


def block(text: str) -> str:
    """The fenced block of Python that holds this text."""
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", PAGE, flags=re.MULTILINE | re.DOTALL)
    (code,) = [dedent(body) for body in blocks if text in body]
    return code


@pytest.fixture
def pasted(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the guide's adapter, entered into ADAPTERS and FORMULAS as the guide says."""
    declared = dict(vars(declarations))
    computed = dict(vars(formulas))
    exec(block("(Adapter):"), declared)
    adapter = declared["QueryBias"]()
    exec(block(f"def {adapter.name}("), computed)
    monkeypatch.setitem(declarations.ADAPTERS, adapter.name, adapter)
    table = {**formulas.FORMULAS, adapter.name: computed[adapter.name]}
    monkeypatch.setattr(formulas, "FORMULAS", table)
    return str(adapter.name)


def test_the_adapter_of_the_guide_corrects_queries(
    one_rank: dist.ProcessGroup, pasted: str
) -> None:
    linear: Any = (
        build("orthogonal", 2, adapters=(pasted,)).decoder.layers[1].self_attention.linear_qkv
    )
    hidden = torch.randn(SEQ, 2, HIDDEN)
    query, key, _ = (heads.detach().clone() for heads in linear(hidden))
    bias = linear.adapters.get_parameter("query_add")
    assert bias.shape == (HEADS * linear.head_dim,) and not bias.any()
    with torch.no_grad():
        bias.copy_(torch.arange(len(bias)))
    moved, same, _ = linear(hidden)
    torch.testing.assert_close(moved, query + bias.view(HEADS, -1))
    assert torch.equal(same, key)


def test_the_adapter_of_the_guide_is_planned_and_not_exported(pasted: str) -> None:
    adapted = (f"attention.adapters=[{pasted}]",)
    plain, biased = (
        make_plan(Request("demo", overrides, gpus=2, gpu="a100-80gb", baseline="vanilla")).chosen
        for overrides in ((), adapted)
    )
    config = load_config("demo", adapted)
    added = config.model.num_layers * config.model.hidden_size
    assert biased.parameters.trainable == plain.parameters.trainable + added
    assert biased.memory.activations > plain.memory.activations
    with pytest.raises(UserError, match=f"adapters has {pasted}, which cannot be folded"):
        architecture_of(config)


def test_the_variant_of_the_guide_is_a_variant(
    one_rank: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = eval(f"{{{block('gaussian_wide')}}}", dict(vars(variants)))
    for name, policy in entered.items():
        monkeypatch.setitem(variants.VARIANTS, name, policy)
    linear: Any = build("gaussian_wide").decoder.layers[0].self_attention.linear_qkv
    assert linear.query_key_weight.std() == pytest.approx(0.1, rel=0.05)
    wide = ("attention.variant=gaussian_wide",)
    frozen = make_plan(Request("demo", wide, gpus=2, gpu="a100-80gb", baseline="vanilla")).chosen
    assert frozen.variant == "gaussian_wide" and frozen.parameters.frozen > 0
