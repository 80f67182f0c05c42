"""Settings of an optimizer's own: declared with its kind, keys of `optimizer.KIND`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml

from laboratory.study.sealed import Sealed, design_settings
from megatron_patches.recipe import optimizers as recipe_optimizers
from megatron_patches.recipe.optimizers import KINDS, Muon
from pretrain.config import optimizer
from pretrain.config.keys import DEFAULTS, effective_changes
from pretrain.config.load import load_config, load_config_with_origins
from pretrain.config.removed import FORMER_KEYS
from pretrain.config.show import value_rows
from pretrain.config.sources import dump_yaml
from pretrain.optimizer import optimizers
from pretrain.telemetry.hparams import hparams
from pretrain.training.engine import OPTIMIZERS
from tests.fabricated_seals import made_seal
from tests.megatron_patches.test_extending import block
from tests.pretrain.config.configurations import refusal, yaml_file

MOMENTUM = ("optimizer.kind=muon", "optimizer.muon.momentum=0.9")


def of_an_earlier_version(values: Mapping[str, Any]) -> dict[str, Any]:
    """What config.yaml held when Muon's settings stood among the others."""
    section = {key: value for key, value in values["optimizer"].items() if key != "muon"}
    return {**values, "optimizer": section | values["optimizer"]["muon"]}


def written(tmp_path: Path, values: Mapping[str, Any]) -> str:
    return yaml_file(tmp_path, dump_yaml(json.loads(json.dumps(values))))


def test_settings_of_the_kind_reach_its_declaration() -> None:
    section = load_config("demo", MOMENTUM).optimizer
    assert section.of_kind == Muon(momentum=0.9)
    assert [rule.name for rule in section.rules] == ["muon", "adamw"]
    assert load_config("demo").optimizer.rules == KINDS["adamw"]().rules


def test_every_kind_has_the_class_that_computes_it() -> None:
    assert {kind().rules[0].name for kind in KINDS.values()} == set(OPTIMIZERS)


def test_each_value_has_its_origin_also_where_a_mapping_gives_it() -> None:
    overrides = ["optimizer.kind=muon", "optimizer.muon={momentum: 0.8}"]
    rows = {
        key: (value, origin)
        for key, value, origin, _ in value_rows(load_config_with_origins("small_modern", overrides))
    }
    assert rows["optimizer.muon.momentum"] == ("0.8", "override")
    # The mapping replaces that of the file.
    assert rows["optimizer.muon.vector_learning_rate"] == ("null", "default")
    rows = {row[0]: row[2] for row in value_rows(load_config_with_origins("small_modern"))}
    assert rows["optimizer.muon.vector_learning_rate"].startswith("small_modern.yaml:")


def test_another_kind_declares_its_settings_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/extending.md to the letter."""
    declared = dict(vars(recipe_optimizers))
    exec(block("SGD = Rule("), declared)
    monkeypatch.setattr(optimizer, "KINDS", declared["KINDS"])
    base = optimizer.OptimizerSection.__base__
    section: Any = optimizer._with_kinds(base)  # type: ignore[type-var]
    values = {"kind": "sgd", "learning_rate": 0.1, "sgd": {"momentum": 0.5}}
    assert section.model_validate(values).of_kind == declared["Sgd"](momentum=0.5)
    names = {**vars(optimizers), **declared, "cast": cast}
    exec(block("class FusedSGD"), names)
    weight = torch.nn.Parameter(torch.ones(5))
    fused = names["FusedSGD"]([{"params": [weight]}], section.model_validate(values))
    for allowed, expected in ((0.0, 1.0), (1.0, 0.9), (1.0, 0.75)):
        weight.grad = torch.full((5,), 4.0)
        fused.divide_gradients(torch.tensor(4.0))
        fused.allow(torch.tensor(allowed))
        fused.step()
        assert weight.tolist() == pytest.approx([expected] * 5)
    with pytest.raises(ValueError, match="less than 1"):
        section.model_validate(values | {"sgd": {"momentum": 1}})
    with pytest.raises(ValueError, match=r"optimizer\.sgd\.momentum=0\.5 has no effect.*kind sgd"):
        section.model_validate(values | {"kind": "muon"})


@pytest.mark.parametrize("overrides", [(), MOMENTUM])
def test_a_run_of_an_earlier_version_is_read(overrides: tuple[str, ...], tmp_path: Path) -> None:
    config = load_config("demo", overrides)
    former = of_an_earlier_version(config.values)
    path = written(tmp_path, former)
    assert load_config(path).values == config.values
    assert not list(effective_changes(yaml.safe_load(Path(path).read_text()), config.values))
    assert design_settings(former) == design_settings(config.values)
    assert load_config(path, MOMENTUM).optimizer.of_kind == Muon(momentum=0.9)
    origins = load_config_with_origins(path).origins
    assert origins["optimizer.muon.momentum"].startswith(path)


@pytest.mark.parametrize("former", FORMER_KEYS)
def test_former_names_are_refused_in_what_is_new(former: str, tmp_path: Path) -> None:
    sentence = f"{former} is now {FORMER_KEYS[former]}; give that instead"
    value = json.dumps(DEFAULTS[FORMER_KEYS[former]])
    assert refusal("demo", f"{former}={value}") == f"override: {sentence}"
    values = load_config("demo").as_dict()
    whole = written(tmp_path, of_an_earlier_version(values))
    assert refusal(whole, f"{former}={value}") == f"override: {sentence}"
    values["optimizer"][former.removeprefix("optimizer.")] = json.loads(value)
    in_file = refusal(written(tmp_path, values))
    assert re.match(rf"config .*mine\.yaml line \d+: {re.escape(sentence)}", in_file)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.muon.momentun=0.9", "did you mean 'optimizer.muon.momentum'?"),
        ("optimizer.muon.momentum=2", "'optimizer.muon.momentum' is 2: it should be less than 1"),
        ("optimizer.muon=5", "section 'optimizer.muon' must hold keys, but is 5"),
        ("optimizer.muon=", "section 'optimizer.muon' must hold keys, but is nothing"),
        ("optimizer.muon.newton_schulz_steps=2.5", "optimizer.muon.newton_schulz_steps"),
        ("optimizer.adamw.eps=1", "unknown key 'optimizer.adamw'"),
    ],
)
def test_what_is_wrong_within_is_named_with_its_place(override: str, words: str) -> None:
    sentence = refusal("demo", "optimizer.kind=muon", override)
    assert sentence.startswith("override: ") and words in sentence


def test_seals_and_tables_have_the_key() -> None:
    config = load_config("demo", MOMENTUM)
    assert hparams(config.values)["optimizer.muon.momentum"] == 0.9
    settings = design_settings(config.values)
    assert settings["optimizer.muon.momentum"] == 0.9
    former = {name: {"optimizer.momentum": 0.9} for name in ("old", "new")}
    seal = made_seal(1).sealed.model_dump() | {"settings": former}
    sealed = Sealed.model_validate(seal).settings["new"]
    assert sealed["optimizer.muon.momentum"] == 0.9 and "optimizer.momentum" not in sealed
