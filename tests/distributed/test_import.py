"""Models of transformers as the beginning of a run.

The same logits, Q and K frozen, under any layout.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.load import load_config
from pretrain.errors import UserError
from tests.distributed.workers.import_weights import STOCK
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

QUIET = {"telemetry__tensorboard": "false", "optimizer__learning_rate": 2e-2, "schedule__steps": 3}
GROUPED = {"model__num_query_groups": 2, "model__tied_embeddings": "false"}
PARALLEL = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("imported")


def without_model(shards: Path, runs: Path, name: str, **changes: object) -> list[str]:
    """Overrides of a tiny run whose model section is somebody else's."""
    overrides = tiny_overrides(shards, runs, name, **{**QUIET, **changes})
    return [
        override
        for override in overrides
        if not override.startswith("model.") or override.startswith("model.dropout")
    ]


@pytest.fixture(scope="module")
def report(tiny_shards: Path, root: Path) -> dict[str, Any]:
    payload = {
        "root": str(root),
        "source": tiny_overrides(tiny_shards, root, "source", **QUIET, **GROUPED),
        "tokenizer": str(tiny_shards / "tokenizer.model"),
        "overrides": without_model(tiny_shards, root, "imported", data__sequence_length=48),
    }
    answer: dict[str, Any] = run_ranks(
        1, "tests.distributed.workers.import_weights:import_all", payload
    )
    assert answer["source"] == "finished"
    return answer


@pytest.fixture(scope="module")
def trained(report: dict[str, Any], tiny_shards: Path, root: Path) -> list[str]:
    """One run on one rank and the same on two, both gone on with.

    Then with other weights in its place.
    """

    def run(name: str, directory: str = "imported", **changes: object) -> tuple[str, list[str]]:
        return str(root / directory / "config.yaml"), without_model(
            tiny_shards, root, name, **changes
        )

    more = {"schedule__steps": 5}
    single = {
        "runs": [
            run("one"),
            run("one", **more),
            run("qwen3-one", "qwen3-imported"),
            run("qwen3-one", "other-imported", **more),
        ]
    }
    two = {"runs": [run("two", **PARALLEL), run("two", **more, **PARALLEL)]}
    two["runs"].append(run("qwen3-two", "qwen3-imported", **PARALLEL))
    single["runs"].append(run("padded-one", "padded-imported"))
    single["runs"].append(run("bare-refused", "bare-imported"))
    config, overrides = run("bare-two", "bare-imported", **PARALLEL)
    remedy = ["model.vocab_size=512", "model.vocab_multiple=96"]
    two["runs"].append((config, [*overrides, *remedy]))
    return [
        *run_ranks(1, "tests.distributed.workers.import_weights:train_all", single),
        *run_ranks(2, "tests.distributed.workers.import_weights:train_all", two),
    ]


def result_of(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return result


def validation_loss(run: Path) -> float:
    return float(result_of(run)["validation"]["loss"])


@pytest.mark.parametrize("variant", ["pretrained", "vanilla"])
@pytest.mark.parametrize("name", STOCK)
def test_what_was_imported_computes_the_same(
    report: dict[str, Any], name: str, variant: str
) -> None:
    assert report[f"{name} {variant}"] <= 1e-5  # of logits of about 5


def test_the_bank_of_an_export_comes_back_bit_for_bit(report: dict[str, Any], root: Path) -> None:
    (file,) = (root / "source").glob("checkpoints/*/checkpoint.json")
    saved = json.loads(file.read_text())["frozen_bank"]["sha256"]
    assert len(saved) == 4 and report["bank"] == saved


def test_it_trains_under_any_layout_and_goes_on(
    trained: list[str], report: dict[str, Any], root: Path
) -> None:
    assert trained[:2] == trained[6:8] == ["finished"] * 2
    for name in ("one", "two"):
        last = sorted((root / name).glob("checkpoints/step_*"))[-1]
        bank = json.loads((last / "checkpoint.json").read_text())["frozen_bank"]
        assert bank["sha256"] == report["bank"] and bank["recipe"]["init"] == "pretrained"
        assert "given_path" not in bank["recipe"]
        assert result_of(root / name)["step"] == 5
    assert validation_loss(root / "one") == pytest.approx(validation_loss(root / "two"), rel=1e-5)
    # It went on from there.
    assert validation_loss(root / "one") < validation_loss(root / "source") - 0.05


def test_qwen3_trains_alike_on_one_rank_and_on_two(trained: list[str], root: Path) -> None:
    assert trained[2] == trained[8] == "finished"
    alone, two = (validation_loss(root / name) for name in ("qwen3-one", "qwen3-two"))
    assert alone == pytest.approx(two, rel=1e-5)


def test_rows_above_the_ids_of_the_tokenizer_are_never_predicted(report: dict[str, Any]) -> None:
    padded = report["padded"]
    assert padded["tokens"] == 512 and padded["rows"] == 640 and padded["difference"] <= 1e-5
    assert padded["largest above"] == -math.inf


def test_a_model_with_more_rows_than_ids_trains_with_its_tokenizer_or_by_the_remedy(
    trained: list[str], root: Path
) -> None:
    assert trained[4] == trained[9] == "finished"
    assert re.match(
        r"error: model\.vocab_size=612 but the tokenizer of .* has 512 tokens; if that is the "
        r"tokenizer of .* rows to spare, set model\.vocab_size=512; otherwise",
        trained[5],
    )
    alone, two = (validation_loss(root / name) for name in ("padded-one", "bare-two"))
    assert alone == pytest.approx(two, rel=1e-5)


def test_other_weights_are_another_run(trained: list[str]) -> None:
    digest = "[0-9a-f]{64}"
    said = rf"error: .* with model\.initial_weights={digest} but this run has {digest}; set it back"
    assert re.match(said, trained[3])


def test_the_file_must_fit_and_be_whole(report: dict[str, Any], root: Path) -> None:
    config = str(root / "imported/config.yaml")
    with pytest.raises(
        UserError, match=r"num_layers=1 but the model in .* has 2; set model\.num_layers=2"
    ):
        load_config(config, ["model.num_layers=1"])
    with pytest.raises(
        UserError, match=r"logit_softcap=5\.0 but the model in .* has None; set .*softcap=null"
    ):
        load_config(config, ["model.logit_softcap=5"])
    with pytest.raises(
        UserError, match=r"attention\.variant=pretrained: .* set model\.initial_weights"
    ):
        load_config(config, ["model.initial_weights=null"])
    with pytest.raises(UserError, match="cannot be used: No such file"):
        load_config(config, [f"model.initial_weights={root / 'gone'}"])
    with pytest.raises(UserError, match=r"set data\.sequence_length=48 or less"):
        load_config(str(root / "gpt2-imported/config.yaml"), ["data.sequence_length=49"])
    spoilt = root / "spoilt.safetensors"
    content = bytearray((root / "imported/weights.safetensors").read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start = (
        8
        + int.from_bytes(content[:8], "little")
        + header["layer.1.attention.key"]["data_offsets"][0]
    )
    content[start + 5] ^= 1
    spoilt.write_bytes(content)
    weights = load_config(config, [f"model.initial_weights={spoilt}"]).given_weights
    assert weights is not None and weights.head(1, "key", 1, 8).shape == (8, 32)
    with pytest.raises(
        ValueError, match=r"head 0 of layer\.1\.attention\.key does not have the SHA-256"
    ):
        weights.head(1, "key", 0, 8)
