"""What is recorded: tags, numbers, strict JSON."""

from __future__ import annotations

import io
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pretrain.runs.tags import METRICS, metric_of
from pretrain.telemetry.records import SaveSeconds
from tests.pretrain.telemetry.records import (
    ALWAYS,
    WITH_CHECKPOINT,
    WITH_PEAK,
    WITH_VALIDATION,
    make_facts,
    make_record,
    open_telemetry,
    read_scalars,
    read_strictly,
    recorded,
)


def test_tags_and_values_are_the_same_in_both_files(tmp_path: Path) -> None:
    saved = make_record(2, validated=True, seconds_stall=0.7)
    plain, full = recorded(tmp_path, make_record(1), saved)
    position = {"step", "tokens", "samples"}
    assert set(plain) == position | ALWAYS | WITH_PEAK
    assert set(full) == position | ALWAYS | WITH_PEAK | WITH_VALIDATION | WITH_CHECKPOINT
    assert (full["step"], full["tokens"], full["samples"]) == (2, 2048, 16)
    declared = [metric_of(tag) for tag in list(full)[3:]]
    assert declared == sorted(declared, key=METRICS.index), "the file's order is the table's"
    scalars = read_scalars(tmp_path)
    sizes = {tag for tag in scalars if tag.endswith("_MiB")}
    assert set(scalars) - sizes == set(full) - position
    assert sizes == {f"{m.tag}_MiB" for m in METRICS if m.unit == "bytes" and m.tag in full}
    in_bytes = dict(scalars["memory/gradients"])[2]
    assert dict(scalars["memory/gradients_MiB"])[2] == pytest.approx(in_bytes / 2**20)
    for record in (plain, full):
        for tag in set(record) - position:
            assert dict(scalars[tag])[record["step"]] == pytest.approx(record[tag], rel=1e-6)


def test_a_record_is_readable_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    for step in (1, 2):
        telemetry.log(make_record(step))
        assert len(read_strictly(tmp_path)) == len(read_scalars(tmp_path)["loss/train"]) == step
    telemetry.close()


def test_throughput_follows_its_formulas(tmp_path: Path) -> None:
    _, record = recorded(tmp_path, make_record(1), make_record(2))
    per_gpu = 1024 / 0.502 / 4
    assert record["throughput/tokens_per_second"] == pytest.approx(1024 / 0.502)
    assert record["throughput/tokens_per_second_per_gpu"] == pytest.approx(per_gpu)
    assert record["throughput/model_tflops_per_gpu"] == pytest.approx(6e6 * per_gpu / 1e12)
    assert record["throughput/mfu"] == pytest.approx(6e6 * per_gpu / 1e12)
    assert record["throughput/hfu"] == pytest.approx(5e6 * per_gpu / 1e12)
    assert record["memory/gradients"] == 3_600_000
    assert record["memory/host_rss"] > 50e6


def test_perplexity_weighs_sources_by_tokens(tmp_path: Path) -> None:
    (record,) = recorded(tmp_path, make_record(1, validated=True))
    assert record["loss/valid"] == pytest.approx(130 / 50)
    assert record["perplexity/valid"] == pytest.approx(math.exp(130 / 50))
    assert record["perplexity/valid/topics"] == pytest.approx(math.exp(3.0))
    assert record["perplexity/valid/prose"] == pytest.approx(math.exp(2.5))


def test_loss_variance_is_that_of_the_window(tmp_path: Path) -> None:
    records = recorded(tmp_path, *map(make_record, range(1, 13)))
    losses = [record["loss/train"] for record in records]
    for index, record in enumerate(records):
        window = losses[max(0, index - 4) : index + 1]
        assert record["stability/loss_variance"] == pytest.approx(
            statistics.pvariance(window), abs=1e-12
        )


def test_unknown_device_logs_no_utilisation_and_says_so_once(tmp_path: Path) -> None:
    output = io.StringIO()
    unknown = {"facts": make_facts(peak=None), "console": Console(file=output)}
    records = recorded(tmp_path, *map(make_record, range(1, 4)), **unknown)
    assert all(not WITH_PEAK & set(record) for record in records)
    assert not WITH_PEAK & set(read_scalars(tmp_path))
    assert "throughput/model_tflops_per_gpu" in records[0]
    assert output.getvalue().count("peak FLOP/s of device 'cpu' is not known") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_logs_the_allocation_peak(tmp_path: Path) -> None:
    block = torch.ones(1 << 20, device="cuda")
    facts = make_facts(device_name=torch.cuda.get_device_name())
    (record,) = recorded(tmp_path, make_record(1), facts=facts)
    assert record["memory/allocated_peak"] >= block.nbytes


def test_values_that_are_not_finite_are_null_in_json_and_kept_in_tensorboard(
    tmp_path: Path,
) -> None:
    losses = (2.0, math.nan, math.inf, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5)
    steps = [make_record(step, loss=loss) for step, loss in enumerate(losses, start=1)]
    last = make_record(10)
    at_once = replace(last.result, seconds=replace(last.result.seconds, step=0.0))
    last = replace(last, result=at_once, validation={"prose": (1e6, 10)})
    records = recorded(tmp_path, *steps, last)
    assert [record["loss/train"] for record in records[:4]] == [2.0, None, None, 3.0]
    variances = [record["stability/loss_variance"] for record in records]
    assert variances[1:7] == [None] * 6 and None not in variances[7:]
    assert (
        records[9]["perplexity/valid"] is None
        and records[9]["throughput/tokens_per_second"] is None
    )
    shown = dict(read_scalars(tmp_path)["loss/train"])
    assert math.isnan(shown[2]) and shown[3] == math.inf


def test_terms_of_the_loss_are_recorded_apart(tmp_path: Path) -> None:
    record = make_record(1)
    penalised = replace(record, result=replace(record.result, auxiliary={"some_penalty": 0.25}))
    first, second = recorded(tmp_path, penalised, make_record(2))
    assert (first["loss/train"], first["loss/some_penalty"]) == (record.result.loss, 0.25)
    assert "loss/some_penalty" not in second
    assert read_scalars(tmp_path)["loss/some_penalty"] == [(1, 0.25)]


def test_facts_may_change_on_the_way_and_it_is_said(tmp_path: Path) -> None:
    output = io.StringIO()
    telemetry = open_telemetry(tmp_path, console=Console(file=output, width=200))
    telemetry.log(make_record(1))
    facts = replace(make_facts(), trainable_parameters=950_000, executed_flops_per_token=5.5e6)
    telemetry.change_facts(facts, "from step 2 on more is trained")
    telemetry.log(make_record(2))
    telemetry.close()
    first, second = read_strictly(tmp_path)
    assert [r["memory/trainable_parameters"] for r in (first, second)] == [900_000, 950_000]
    utilisation = [r["throughput/hfu"] / r["throughput/mfu"] for r in (first, second)]
    assert utilisation == pytest.approx([5 / 6, 5.5 / 6])
    assert "from step 2 on more is trained" in output.getvalue()


def test_every_keeps_regular_steps_and_those_with_something_to_tell(tmp_path: Path) -> None:
    steps = [
        make_record(step, validated=step == 6, seconds_stall=0.1 if step == 7 else None)
        for step in range(1, 15)
    ]
    records = recorded(tmp_path, *steps, every=4, total_steps=14)
    assert [record["step"] for record in records] == [4, 6, 7, 8, 12, 14]
    assert [step for step, _ in read_scalars(tmp_path)["loss/train"]] == [4, 6, 7, 8, 12, 14]
    # Speed is that of the step itself, also after steps that were not written.
    assert records[3]["throughput/tokens_per_second"] == pytest.approx(1024 / 0.508)


def test_when_a_checkpoint_is_written_decides_nothing_about_which_steps_are(tmp_path: Path) -> None:
    steps = [make_record(step) for step in range(1, 9)]
    steps[4] = replace(steps[4], written=SaveSeconds(write=0.5, total=0.6))
    first, second = recorded(tmp_path, *steps, every=4, total_steps=8)
    assert (first["step"], second["step"]) == (4, 8)
    assert "time/checkpoint_write" not in first
    assert (second["time/checkpoint_write"], second["time/checkpoint"]) == (0.5, 0.6)


def test_without_tensorboard_only_metrics_are_written(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path, tensorboard=False)
    telemetry.log(make_record(1))
    telemetry.sync()
    telemetry.close({"loss/train": 1.0})
    assert not (tmp_path / "tensorboard").exists()
    assert len(read_strictly(tmp_path)) == 1


def test_a_step_cannot_be_logged_twice(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    telemetry.log(make_record(1))
    with pytest.raises(ValueError, match="step 1 was logged after step 1"):
        telemetry.log(make_record(1))
