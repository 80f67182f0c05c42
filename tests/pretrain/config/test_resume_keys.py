"""Every key of the configuration is classified by what it does on resume, once, and as the program acts."""

from pathlib import Path

import pytest
import yaml

from pretrain.checkpoint.identity import DATA_KEYS
from pretrain.config.load import load_config
from pretrain.config.resume import (
    CLASSES,
    EFFECTIVE,
    LAYOUT,
    NO_EFFECT,
    REFUSED,
    OnResume,
    class_of,
    effective_changes,
)
from pretrain.config.tree import Config
from tests.ranks import ROOT


def keys() -> list[tuple[str, str]]:
    return [
        (section, key)
        for section, field in Config.model_fields.items()
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    ]


@pytest.mark.parametrize(("section", "key"), keys())
def test_every_key_is_classified(section: str, key: str) -> None:
    assert class_of(section, key) in OnResume


def test_the_table_has_each_key_once_and_no_other() -> None:
    assert len(keys()) > 60
    assert len(CLASSES) == len(REFUSED) + len(LAYOUT) + len(EFFECTIVE) + len(NO_EFFECT)
    known = {f"{section}.{key}" for section, key in keys()} | {f"{section}.*" for section, _ in keys()}
    assert CLASSES.keys() <= known
    whole = {key.removesuffix("*") for key in CLASSES if key.endswith("*")}
    assert not [key for key in CLASSES if not key.endswith("*") and key.startswith(tuple(whole))]
    with pytest.raises(KeyError):
        class_of("optimizer", "momentum")


def test_data_keys_that_may_be_allowed_to_change_are_refused_otherwise() -> None:
    assert set(DATA_KEYS) <= set(REFUSED)


def test_changes_are_what_takes_effect_and_nothing_else() -> None:
    before = yaml.safe_load(load_config("demo").to_yaml())
    del before["stability"]  # as an older version would have left it
    overrides = (
        "optimizer.weight_decay=0.1",
        "optimizer.betas=[0.8, 0.9]",
        "schedule.steps=300",
        "run.name=other",
        "data.loader_workers=2",
        "stability.max_skipped=5",
    )
    changed = list(effective_changes(before, load_config("demo", overrides)))
    assert [str(change) for change in changed] == [
        "optimizer.betas is [0.8, 0.9], was [0.9, 0.98]",
        "optimizer.weight_decay is 0.1, was 0.01",
        "schedule.steps is 300, was 240",
    ]
    assert list(effective_changes(before, load_config("demo"))) == []


def test_the_documentation_has_the_same_table() -> None:
    page = (ROOT / Path("docs/operations.md")).read_text()
    for key in (*REFUSED, *LAYOUT, *EFFECTIVE, *NO_EFFECT):
        assert f"`{key}`" in page, key
