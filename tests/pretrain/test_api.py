"""The public interface: the examples of docs/api.md run, on real runs.

Wrong requests are refused.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.samples import TrainingSamples
from pretrain import api
from pretrain.config.load import load_config
from pretrain.data.open import open_data, read_blend
from pretrain.errors import UserError
from tests.distributed.exports import QUIET
from tests.ranks import ROOT, run_program, run_ranks
from tests.tiny import tiny_overrides

PAGE = (ROOT / "docs/api.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_every_public_name_has_an_example() -> None:
    imported = {
        name
        for names in re.findall(
            r"^from pretrain\.api import (.*)$", "".join(EXAMPLES), flags=re.MULTILINE
        )
        for name in names.split(", ")
    }
    # FinishedRun is what load_run returns.
    assert imported | {"FinishedRun"} == {*api.__all__} and len(api.__all__) <= 13
    assert all(f"`{name}`" in PAGE and hasattr(api, name) for name in api.__all__)


def program(directory: Path) -> Path:
    """The examples in one file, so that a traceback shows the line."""
    file = directory / "examples.py"
    file.write_text("\n".join(EXAMPLES))
    return file


@pytest.mark.slow
@pytest.mark.distributed
def test_the_examples_run(tiny_shards: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    runs = tmp_path / "demo/runs"
    variants = {name: {**QUIET, "attention__variant": name} for name in ("vanilla", "orthogonal")}
    payload = [
        tiny_overrides(tiny_shards, runs, name, **changes) for name, changes in variants.items()
    ]
    states = run_ranks(1, "tests.distributed.workers.runs:train_all", {"runs": payload})
    assert states == ["finished"] * 2
    shutil.copy(tiny_shards / "tokenizer.model", tmp_path)
    done = run_program(
        [sys.executable, program(tmp_path)], environment={"PYTHONPATH": str(ROOT)}, where=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "+0.080 nats, +0.071 to +0.089, p = 1e-05"
    assert lines[1].startswith("orthogonal ") and lines[1].endswith(" 4096")
    assert lines[2].startswith("orthogonal ") and lines[3].endswith(" days")
    manifest = read_manifest(tmp_path / "shards")
    documents = sum(shard.documents for shard in manifest.shards_of("train"))
    assert lines[4] == f"{documents} {manifest.fingerprint[:12]}" and 180 < documents < 200
    assert lines[5].startswith("Starcoder2ForCausalLM ") and len(lines) > 6
    assert_samples_are_those_of_the_run(runs / "orthogonal")
    assert (tmp_path / "comparison/report.md").is_file() and (
        tmp_path / "exported/config.json"
    ).is_file()
    with pytest.raises(UserError, match="exported exists already"):
        api.export(runs / "orthogonal", tmp_path / "exported")
    with pytest.raises(UserError, match=r"^dtype is 'fp16'; give fp32 or bf16$"):
        api.export(runs / "orthogonal", tmp_path / "other", dtype="fp16")


def assert_samples_are_those_of_the_run(run: Path) -> None:
    """By a DataLoader whose worker opens the shards for itself."""
    config = load_config(str(run / "config.yaml"))
    data = open_data(config.data, read_blend(config.data), seed=config.data_seed)
    taken = api.samples(run)
    assert len(taken) == config.total_steps * config.data.global_batch_size
    loader = DataLoader(taken, batch_size=3, num_workers=1, multiprocessing_context="spawn")
    read = torch.cat(list(loader)).numpy()
    assert np.array_equal(read, data.samples.blocks(np.arange(len(taken))))
    with pytest.raises(IndexError):
        taken[len(taken)]


def test_samples_of_shards_are_an_epoch(tiny_shards: Path, tmp_path: Path) -> None:
    samples = api.samples(tiny_shards, sequence_length=64, seed=3)
    reference = TrainingSamples(read_manifest(tiny_shards), 64, 3)
    assert len(samples) == reference.samples_per_epoch
    assert np.array_equal(
        torch.stack([samples[0], samples[7]]).numpy(), reference.blocks(np.array([0, 7]))
    )
    with pytest.raises(UserError, match="is not a run: give the sequence_length"):
        api.samples(tiny_shards)
    with pytest.raises(UserError, match="absent does not exist"):
        api.samples(tmp_path / "absent", sequence_length=64)


@pytest.mark.distributed
def test_data_in_memory_gives_the_shards_of_a_file(tiny_shards: Path, tmp_path: Path) -> None:
    texts = [f"Text {n} of some words, and {n**3} more." for n in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model = tiny_shards / "tokenizer.model"
    table = datasets.Dataset.from_dict({"text": texts, "ids": [[1]] * 300})
    manifests = {
        name: api.tokenize(data, model, tmp_path / name, workers=workers)
        for name, data, workers in (
            ("file", tmp_path / "a.jsonl", 1),
            ("dataset", table, 2),
            ("stream", table.to_iterable_dataset(num_shards=3), 2),
            ("texts", texts, 1),
            ("generator", (text for text in texts), 1),
        )
    }
    fingerprints = {manifest["fingerprint"] for manifest in manifests.values()}
    assert len(fingerprints) == 1
    assert manifests["dataset"]["origin"]["revision"] == table._fingerprint
    assert len(manifests["stream"]["inputs"]) == 3
    # Again: a Dataset by its fingerprint, texts by their hash.
    assert api.tokenize(texts, model, tmp_path / "texts") == manifests["texts"]
    with pytest.raises(UserError, match="changed after its shards were made"):
        api.tokenize(texts[:-1], model, tmp_path / "texts")
    with pytest.raises(UserError, match="was begun with inputs of Dataset at "):
        api.tokenize(table.select(range(9)), model, tmp_path / "dataset")


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (7, {}, "data is int; give a Dataset, an IterableDataset, or an iterable of texts"),
        ({"text": ["a"]}, {}, "data is dict"),
        (datasets.Dataset.from_dict({"x": ["a"]}), {}, 'no column "text", it has x'),
        (datasets.DatasetDict(), {}, "has the splits "),
        (iter(["a"]), {"workers": 2}, "workers 2: the data set cannot be sent to other processes"),
        (["a"], {"validation_fraction": 2.0}, "--validation-fraction 2.0 must be from 0 to 1"),
    ],
)
def test_data_that_cannot_be_tokenised(
    tiny_shards: Path, tmp_path: Path, data: Any, options: dict[str, Any], said: str
) -> None:
    data = (text for text in data) if said.startswith("workers") else data
    with pytest.raises(UserError, match=re.escape(said)):
        api.tokenize(data, tiny_shards / "tokenizer.model", tmp_path / "out", **options)


@pytest.mark.full
def test_a_typed_program_may_use_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", program(tmp_path)]
    done = run_program(command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_models_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(
        UserError, match="there is no model 'vanilla' to compare with; there are one, other"
    ):
        api.paired_gaps({"one": {1: 3.0}, "other": {2: 3.1}}, "vanilla")
    with pytest.raises(UserError, match="'other' and 'one' have no seed in common"):
        api.paired_gaps({"one": {1: 3.0}, "other": {2: 3.1}}, "one")
    with pytest.raises(UserError, match="'other' has nan at seed 2, which is not a finite number"):
        api.paired_gaps({"one": {2: 3.0}, "other": {2: float("nan")}}, "one")


def test_losses_of_any_models_have_the_statistics_of_runs() -> None:
    base = {seed: 3 + 0.01 * seed for seed in range(1, 7)}
    other = {seed: loss + (0.1 if seed % 2 else 0.08) for seed, loss in base.items()}
    noise = {seed: loss + (-1) ** seed * 0.01 for seed, loss in base.items()}
    gaps = api.paired_gaps({"base": base, "other": other, "noise": noise}, "base")
    assert [*gaps] == ["other", "noise"]
    assert gaps["other"].mean == pytest.approx(0.09) and gaps["other"].significance_claimed
    assert gaps["noise"].mean == pytest.approx(0) and not gaps["noise"].significance_claimed
    # Holm: the smaller of two p values is doubled.
    assert gaps["other"].t_p is not None and gaps["other"].t_p_holm == pytest.approx(
        2 * gaps["other"].t_p
    )


def test_a_plan_is_the_one_of_the_verb() -> None:
    from pretrain.plan.estimate import Request, make_plan

    plan = api.plan("small", ["attention.variant=monarch"], gpus=8, price=2.0)
    overrides = ("attention.variant=monarch",)
    wanted = make_plan(Request("small", overrides, 8, "a100-80gb", baseline="vanilla", price=2.0))
    assert plan == wanted and plan.chosen.variant == "monarch"
