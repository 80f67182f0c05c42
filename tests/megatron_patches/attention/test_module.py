"""The plain module against the program's own attention: the same rows and outputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_patches.attention.module import KNOWN, FrozenAttention
from megatron_patches.attention.projections import FrozenQueryKeyValueLinear
from megatron_patches.attention.rotary import RotaryAngles
from megatron_patches.bank.orthonormal import ROLES
from megatron_patches.bank.shards import bank_rows
from megatron_patches.errors import MethodError
from megatron_patches.recipe.variants import VARIANTS
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN, SEED, SEQ, build
from tests.ranks import run_program

BATCH, LAYER, BASE = 3, 1, 100.0
HALF = {"frozen_heads": (("0%-100%", 0.5),)}
BUFFERS = ("query_key_weight", "query_key_right", "query_key_left")
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("orthogonal", 4, {}),
    ("orthogonal", 2, {"shared": True}),
    ("orthogonal", 2, {"scope": "layer", "construction": "householder"}),
    ("gaussian", 2, {}),
    ("gaussian", 1, {"gaussian_std": 0.02}),
    ("dct", 4, {}),
    ("orthogonal_shared", 4, {}),
    ("monarch", 4, {}),
    ("monarch", 2, {"shared": True}),
    ("monarch_shared_conv", 4, {}),
    ("monarch_shared_conv", 2, {"taps": 2, "convolved": "key"}),
    ("orthogonal", 2, {"adapters": ("low_rank", "query_key_bias", "channel_scale"), "low_rank": 3}),
    ("monarch", 4, {**HALF, "adapters": ("low_rank", "short_convolution")}),
    ("gaussian", 4, {**HALF, "shared": True}),
    ("orthogonal", 2, {"frozen_roles": "query"}),
    ("vanilla", 2, {"adapters": ("query_key_bias",)}),
    ("orthogonal_trainable", 2, {"shared": True}),
    ("orthogonal_trainable", 4, {"construction": "monarch", "scope": "layer", "shared": True}),
    ("monarch_trainable", 2, {}),
    ("low_rank", 2, {"low_rank": 5}),
    ("orthogonal", 2, {"qk_norm": True}),
    ("monarch_shared_conv", 4, {**HALF, "qk_norm": True}),
]


def plain(variant: str, groups: int, **more: Any) -> FrozenAttention:
    more = {"seed": SEED, "layer": LAYER, "num_query_groups": groups, "head_dim": HEAD_DIM, **more}
    return FrozenAttention(HIDDEN, HEADS, variant=variant, **more)


def of_program(name: str) -> str:
    """Return the program's name of a parameter of the plain module."""
    other = {"v_proj.weight": "linear_qkv.value_weight", "o_proj.weight": "linear_proj.weight"}
    return other.get(name, name if "layernorm" in name else f"linear_qkv.{name}")


def buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The frozen rows, or their factors, by name."""
    return {name: held for name in BUFFERS if (held := getattr(module, name)) is not None}


def assert_same_bits(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    held = buffers(ours)
    wanted = buffers(theirs)
    assert held and held.keys() == wanted.keys()
    for name, rows in held.items():
        assert rows.dtype == wanted[name].dtype and torch.equal(rows, wanted[name]), name


@pytest.mark.parametrize(("variant", "groups", "axes"), CASES)
@pytest.mark.parametrize("rotary", [False, True])
def test_rows_outputs_and_gradients_are_those_of_the_program(
    one_rank: dist.ProcessGroup, variant: str, groups: int, axes: dict[str, Any], rotary: bool
) -> None:
    angles = RotaryAngles(HEAD_DIM, BASE) if rotary else None
    theirs = (
        build(variant, groups, rotary=angles, **axes).decoder.layers[LAYER].self_attention.eval()
    )
    own_axes = {**axes, "frozen_heads": 0.5} if "frozen_heads" in axes else axes
    ours = plain(variant, groups, rotary_base=BASE if rotary else None, **own_axes)
    assert isinstance(theirs.linear_qkv, FrozenQueryKeyValueLinear)
    assert_same_bits(ours, theirs.linear_qkv)
    live = dict(theirs.named_parameters())
    pairs = {name: live.pop(of_program(name)) for name, _ in ours.named_parameters()}
    assert not live
    generator = torch.Generator().manual_seed(1)
    for name, values in ours.named_parameters():
        if "taps" in name or "gain" in name or "_left_" in name:  # starts that are not drawn
            assert torch.equal(values, pairs[name])
        with torch.no_grad():  # away from where some adapters change nothing
            pairs[name].add_(torch.randn(values.shape, generator=generator), alpha=0.1)
            values.copy_(pairs[name])
    hidden = torch.randn(SEQ, BATCH, HIDDEN, generator=torch.Generator().manual_seed(0))
    program_input = hidden.clone().requires_grad_()
    copy = hidden.transpose(0, 1).contiguous().requires_grad_()
    program_output = theirs(program_input, None)[0]
    output = ours(copy)
    assert program_output.abs().max() > 1e-3
    torch.testing.assert_close(output.transpose(0, 1), program_output, rtol=0, atol=1e-6)
    program_output.square().sum().backward()
    output.square().sum().backward()
    assert program_input.grad is not None and copy.grad is not None
    grads = {name: (values.grad, pairs[name].grad) for name, values in ours.named_parameters()}
    for mine, program in ((copy.grad.transpose(0, 1), program_input.grad), *grads.values()):
        torch.testing.assert_close(mine, program, rtol=1e-5, atol=1e-5)


def test_another_seed_or_layer_has_other_rows() -> None:
    (first,), (seed,), (layer,) = (
        buffers(plain("orthogonal", 4, **other)).values()
        for other in ({}, {"seed": 6}, {"layer": 0})
    )
    assert not torch.equal(first, seed) and not torch.equal(first, layer)


def test_rows_by_role_and_head_are_those_of_the_bank() -> None:
    module = plain("gaussian", 2, dtype=torch.float64)
    heads = {"query": range(4), "key": range(2)}
    rows = [bank_rows(module.recipe, LAYER, role, [head]) for role in ROLES for head in heads[role]]
    assert module.query_key_weight is not None
    assert torch.equal(
        module.query_key_weight, torch.cat([torch.from_numpy(head_rows) for head_rows in rows])
    )


@pytest.mark.parametrize("variant", ["orthogonal", "monarch"])
def test_a_cast_module_has_the_rows_of_a_program_in_that_dtype(
    one_rank: dist.ProcessGroup, variant: str
) -> None:
    wanted = build(variant, 2, torch.bfloat16).decoder.layers[LAYER].self_attention.linear_qkv
    assert_same_bits(plain(variant, 2).to(torch.bfloat16), wanted)
    assert_same_bits(plain(variant, 2, dtype=torch.bfloat16), wanted)
    # Rounded by way of another type rows are others, which is why they are drawn anew.
    twice = plain(variant, 2, dtype=torch.float16).to(torch.bfloat16)
    assert_same_bits(twice, wanted)


@pytest.mark.parametrize("variant", ["orthogonal", "monarch"])
def test_rows_come_back_on_a_device_after_meta(variant: str) -> None:
    module = plain(variant, 2, device="meta")
    assert all(held.is_meta for held in buffers(module).values())
    assert_same_bits(module.to_empty(device="cpu"), plain(variant, 2))


@pytest.mark.parametrize("variant", ["orthogonal", "monarch"])
def test_a_state_dict_holds_what_trains_and_which_rows_do_not(variant: str) -> None:
    module = plain(variant, 4)
    other = plain(variant, 4)
    trained = dict(module.named_parameters()).keys()
    assert trained == {"v_proj.weight", "o_proj.weight"}
    assert set(module.state_dict()) == trained | {"_extra_state"}
    other.load_state_dict(module.state_dict())
    hidden = torch.randn(BATCH, SEQ, HIDDEN)
    assert torch.equal(module(hidden), other(hidden))


def frozen(**more: Any) -> FrozenAttention:
    return FrozenAttention(HIDDEN, HEADS, **{"seed": 1, "layer": 0, **more})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"seed": 2}, "seed is 1 there and 2 here"),
        ({"layer": 3}, "layer is 0 there and 3 here"),
        ({"construction": "svd"}, "construction is qr there and svd here"),
        ({"variant": "gaussian"}, "init is orthogonal there and gaussian here"),
        ({"variant": "vanilla"}, "construction is qr there and None here"),
    ],
)
def test_weights_over_other_rows_are_refused(
    more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    saved = frozen().state_dict()
    with pytest.raises(MethodError, match=f"belong to other frozen rows: .*{said}"):
        frozen(**more).load_state_dict(saved)
    model = torch.nn.ModuleDict({"attention": frozen(**more)})
    with pytest.raises(MethodError, match=said):
        model.load_state_dict({f"attention.{key}": value for key, value in saved.items()})
    save_file(saved, tmp_path / "weights.safetensors")
    rounded = frozen(dtype=torch.bfloat16)
    rounded.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    torch.testing.assert_close(rounded.v_proj.weight, saved["v_proj.weight"].bfloat16())


def test_without_frozen_rows_any_seed_is_the_same() -> None:
    trained = frozen(variant="orthogonal_trainable")
    other = frozen(variant="orthogonal_trainable", seed=2)
    other.load_state_dict(trained.state_dict())
    hidden = torch.randn(BATCH, SEQ, HIDDEN)
    assert torch.equal(trained(hidden), other(hidden))


def test_weights_of_an_older_version_are_read_with_a_warning() -> None:
    saved = frozen().state_dict()
    del saved["_extra_state"]
    with pytest.warns(UserWarning, match="do not say which frozen rows they belong to"):
        frozen().load_state_dict(saved)


@pytest.mark.parametrize("variant", ["orthogonal", "monarch"])
def test_a_training_under_autocast(variant: str) -> None:
    module = plain(variant, 2, rotary_base=BASE)
    hidden = torch.randn(BATCH, SEQ, HIDDEN)
    wanted = module(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = module(hidden.requires_grad_())
        rounded.float().square().sum().backward()
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(
        rounded.float(), wanted, rtol=0.1, atol=0.03 * float(wanted.detach().abs().max())
    )
    assert hidden.grad is not None and module.v_proj.weight.grad is not None


@pytest.mark.parametrize("variant", sorted({*VARIANTS} - {*KNOWN}))
def test_a_design_that_it_cannot_be_is_refused(variant: str) -> None:
    with pytest.raises(MethodError, match=f"variant '{variant}' is about more than one layer"):
        plain(variant, 4)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"variant": "rotated"}, "attention.variant is 'rotated'; known variants: vanilla"),
        ({"layer": -1}, "layer=-1 is negative; layers count from 0"),
        ({"num_query_groups": 3}, "num_attention_heads=4 is not divisible by num_query_groups=3"),
        (
            {"hidden_size": 42},
            "hidden_size=42 is not divisible by num_attention_heads=4; give head_dim",
        ),
        ({"num_attention_heads": 0}, "hidden_size=40 is not divisible by num_attention_heads=0"),
        (
            {"head_dim": 5, "rotary_base": 10.0},
            "head_dim=5 is odd; rotary positions need an even one",
        ),
        (
            {"variant": "dct", "construction": "cayley"},
            "construction=cayley contradicts variant 'dct'",
        ),
        ({"head_dim": 80}, "head_dim=80 is larger than hidden_size=40"),
        ({"frozen_roles": "queries"}, "frozen_roles is 'queries'; known values: both, query, key"),
        (
            {"adapters": ["short_convolution"], "convolved": "keys"},
            "attention.convolved is 'keys'; known values: both, key, value",
        ),
        (
            {"adapters": ["short_convolution"], "taps": 1},
            "attention.taps is 1; it must be at least 2 and at most 64",
        ),
        (
            {"adapters": ["low_rank"], "low_rank": 0},
            "attention.low_rank is 0; it must be at least 1 and at most",
        ),
        ({"adapters": ["low_rank"], "frozen_heads": 0}, "frozen_heads=0 freezes no head; use"),
    ],
)
def test_impossible_sizes_are_one_sentence(more: dict[str, Any], said: str) -> None:
    with pytest.raises(MethodError, match=said):
        FrozenAttention(
            **{"hidden_size": 40, "num_attention_heads": 4, "seed": 1, "layer": 0, **more}
        )


@pytest.mark.distributed
def test_neither_megatron_core_nor_deepspeed_is_imported() -> None:
    program = """
import sys, torch
from pretrain.api import FrozenAttention
for variant in ("orthogonal", "monarch"):
    FrozenAttention(32, 4, seed=1, layer=0, variant=variant)(torch.zeros(1, 3, 32)).sum().backward()
unwanted = {"megatron", "deepspeed", "scipy", "matplotlib", "transformers"}
sys.exit(", ".join(unwanted & {*sys.modules}) or 0)
"""
    done = run_program([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
