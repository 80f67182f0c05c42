"""The records of the configuration keys.

Complete, as the program acts, and as the documentation has them.
"""

import pytest
import yaml
from pydantic.fields import FieldInfo

from laboratory.compare.comparability import EXPECTED_TO_DIFFER
from megatron_patches.recipe.policy import AXES
from pretrain.checkpoint.identity import DATA_KEYS
from pretrain.config.keys import FIELDS, KEYS, effective_changes
from pretrain.config.load import load_config
from pretrain.config.types import OnResume, Setting, setting, setting_of
from pretrain.telemetry.hparams import hparams
from tests.configuration_page import configuration_page
from tests.ranks import ROOT

RECORDING = {
    f"telemetry.{key}"
    for key in (
        "tensorboard",
        "wandb",
        "attention_every",
        "weights_every",
        "spectral_norms",
        "sample_prompts",
        "sample_tokens",
        "profile",
    )
}
"""Keys of records that no comparison of runs reads."""


@pytest.mark.parametrize(("key", "field"), FIELDS.items())
def test_every_key_has_a_complete_record(key: str, field: FieldInfo) -> None:
    record = setting_of(field)
    assert record is KEYS[key] and isinstance(record, Setting)
    assert record.on_resume in OnResume
    assert (field.description or "").endswith(".")
    # What a checkpoint compares is refused; what it refuses, it compares by the value, the data or
    # the bank.
    if record.identity or record.data_change:
        assert record.on_resume is OnResume.REFUSED
    if record.on_resume is OnResume.REFUSED and not record.identity:
        assert key in ("data.directory", "data.blend") or key.startswith("attention.")
    if record.method:
        assert record.hparam
    section, _, name = key.partition(".")
    for other in record.excludes:
        assert {name, *record.excludes} == {other, *KEYS[f"{section}.{other}"].excludes}
    if record.trunk:  # what is refused is so anyway
        assert record.on_resume is OnResume.EFFECTIVE


def test_a_key_without_a_record_is_noticed() -> None:
    with pytest.raises(TypeError, match="declared with `setting`: Nothing"):
        setting_of(FieldInfo(description="Nothing."))
    with pytest.raises(TypeError):
        setting(1, "A key without a record.")  # type: ignore[call-arg]


def test_the_queries_find_what_they_ask_for() -> None:
    assert len(KEYS) > 60
    assert DATA_KEYS == ("data.sequence_length", "data.seed", "data.reset_at_document_end")
    places = ("run.", "attention.", "checkpoint.")
    assert {key for key in EXPECTED_TO_DIFFER if not key.startswith(places)} == {
        "data.directory",
        "data.seed",
        "data.cache_directory",
        "data.loader_workers",
        "data.allow_change",
        "schedule.branch_from",
        *RECORDING,
    }
    sections = ("model", "attention", "optimizer", "schedule", "data", "precision")
    assert {key for key, record in KEYS.items() if record.hparam} == {
        "run.seed",
        *(key for key in KEYS if key.startswith(tuple(f"{name}." for name in sections))),
    }
    assert set(hparams(load_config("demo").values)) == {
        key for key, record in KEYS.items() if record.hparam
    }
    assert {key for key, record in KEYS.items() if record.hparam and not record.method} == {
        "run.seed",
        "attention.adapters",
        "attention.seed",
        "data.seed",
        "data.directory",
        "data.cache_directory",
        "data.loader_workers",
        "data.allow_change",
        "data.validate_every",
        "data.micro_batch_size",
        "schedule.branch_from",
    }
    layout = {"data.micro_batch_size", "data.directory", "attention.seed"}
    records = {"data.validate_every", "checkpoint.every", "checkpoint.keep_last"}
    assert {key for key, record in KEYS.items() if not record.sealed} == {
        *(key for key, record in KEYS.items() if record.on_resume is OnResume.NO_EFFECT),
        *(key for key in KEYS if key.startswith(("telemetry.", "parallel."))),
        *layout,
        *records,
    }
    labels = {key for key, record in KEYS.items() if record.label}
    assert labels == {f"attention.{name}" for name in AXES} - {"attention.adapters"}


def test_changes_are_what_takes_effect_and_nothing_else() -> None:
    saved_values = yaml.safe_load(load_config("demo").to_yaml())
    del saved_values["stability"]  # as an older version would have left it
    overrides = (
        "optimizer.weight_decay=0.1",
        "optimizer.betas=[0.8, 0.9]",
        "schedule.steps=300",
        "run.name=other",
        "data.loader_workers=2",
        "stability.max_skipped=5",
    )
    changed = list(effective_changes(saved_values, load_config("demo", overrides).values))
    assert [str(change) for change in changed] == [
        "optimizer.betas is [0.8, 0.9], was [0.9, 0.98]",
        "optimizer.weight_decay is 0.1, was 0.01",
        "schedule.steps is 300, was 240",
    ]
    assert list(effective_changes(saved_values, load_config("demo").values)) == []


def test_the_page_of_all_keys_is_made_from_the_declarations() -> None:
    page = ROOT / "docs/configuration.md"
    command = "python -m tests.configuration_page > docs/configuration.md"
    assert page.read_text() == configuration_page(), f"docs/configuration.md is old; run: {command}"
    assert command in page.read_text()
    for key in KEYS:
        assert f"\n| `{key}` | " in page.read_text(), key
