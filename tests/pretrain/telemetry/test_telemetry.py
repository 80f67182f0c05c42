"""Telemetry: tags, numbers, strict JSON, and one unbroken series after kill -9 and resume."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from pretrain.errors import UserError
from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.position import Position
from pretrain.runs.tags import HOST_BYTES, METRICS, PERPLEXITY_OF_SOURCE, When, metric_of, tags_of
from pretrain.telemetry.event_file import FILE_PREFIX
from pretrain.telemetry.records import RunFacts, StepRecord, StepResult, StepSeconds
from pretrain.telemetry.telemetry import Telemetry

REPOSITORY = Path(__file__).resolve().parents[3]

ALWAYS = tags_of(When.ALWAYS)
WITH_PEAK = tags_of(When.PEAK_KNOWN)
WITH_VALIDATION = tags_of(When.VALIDATED) | {PERPLEXITY_OF_SOURCE.of(name) for name in ("prose", "topics")}
WITH_CHECKPOINT = tags_of(When.SAVED)


def make_facts(peak: float | None = 1e12, device_name: str = "cpu") -> RunFacts:
    return RunFacts(
        world_size=4,
        device_name=device_name,
        model_flops_per_token=6e6,
        executed_flops_per_token=5e6,
        peak_flops_per_device=peak,
        trainable_parameters=900_000,
        frozen_parameters=100_000,
        gradient_bytes=3_600_000,
        optimizer_state_bytes=7_200_000,
    )


def make_record(
    step: int, loss: float | None = None, validated: bool = False, seconds_checkpoint: float | None = None
) -> StepRecord:
    """A record whose every number is a function of the step."""
    result = StepResult(
        loss=5 / math.sqrt(step) + 0.1 * math.sin(step) if loss is None else loss,
        auxiliary={},
        gradient_norm=1 + 0.01 * step,
        learning_rate=1e-3 / step,
        seconds=StepSeconds(step=0.5 + 0.001 * step, data=0.01, forward_backward=0.4, optimizer=0.09),
    )
    return StepRecord(
        position=Position(step, 8 * step, 1024 * step),
        result=result,
        seconds_checkpoint=seconds_checkpoint,
        validation={"topics": (30.0, 10), "prose": (100.0, 40)} if validated else None,
    )


def open_telemetry(run_path: Path, **changes: Any) -> Telemetry:
    settings: dict[str, Any] = {
        "facts": make_facts(),
        "every": 1,
        "tensorboard": True,
        "variance_window": 5,
        "hparams": {"attention.variant": "orthogonal", "optimizer.learning_rate": 1e-3, "model.tied": True},
        "total_steps": 20,
        "resume_step": 0,
        "console": Console(file=io.StringIO()),
    }
    settings.update(changes)
    return Telemetry(run_path, settings.pop("facts"), **settings)


def read_strictly(run_path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, refusing NaN and Infinity, which are not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (run_path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def read_scalars(run_path: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar TensorBoard shows, tag -> (step, value), the same by both of its Python loaders."""
    directory = str(run_path / "tensorboard")
    events = EventAccumulator(directory, size_guidance={"scalars": 0}).Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    server = plugin_event_accumulator.EventAccumulator(
        directory, tensor_size_guidance={"scalars": 0}
    ).Reload()
    for tag, steps in scalars.items():
        assert [event.step for event in server.Tensors(tag)] == [step for step, _ in steps]
    return scalars


def deterministic(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what the machine decides; times and speeds are the test's own and stay."""
    return [{key: value for key, value in record.items() if key != HOST_BYTES.tag} for record in records]


def test_tags_and_values_are_the_same_in_both_files(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    telemetry.log(make_record(1))
    telemetry.log(make_record(2, validated=True, seconds_checkpoint=0.7))
    telemetry.close()
    plain, full = read_strictly(tmp_path)
    place = {"step", "tokens", "samples"}
    assert set(plain) == place | ALWAYS | WITH_PEAK
    assert set(full) == place | ALWAYS | WITH_PEAK | WITH_VALIDATION | WITH_CHECKPOINT
    assert (full["step"], full["tokens"], full["samples"]) == (2, 2048, 16)
    declared = [metric_of(tag) for tag in list(full)[3:]]
    assert declared == sorted(declared, key=METRICS.index), "the file's order is the table's"
    scalars = read_scalars(tmp_path)
    assert set(scalars) == set(full) - place
    for record in (plain, full):
        for tag in set(record) - place:
            assert dict(scalars[tag])[record["step"]] == pytest.approx(record[tag], rel=1e-6)


def test_a_record_is_readable_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    for step in (1, 2):
        telemetry.log(make_record(step))
        assert len(read_strictly(tmp_path)) == len(read_scalars(tmp_path)["loss/train"]) == step
    telemetry.close()


def test_throughput_follows_its_formulas(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    telemetry.log(make_record(1))
    telemetry.log(make_record(2))
    telemetry.close()
    record = read_strictly(tmp_path)[1]
    per_gpu = 1024 / 0.502 / 4
    assert record["throughput/tokens_per_second"] == pytest.approx(1024 / 0.502)
    assert record["throughput/tokens_per_second_per_gpu"] == pytest.approx(per_gpu)
    assert record["throughput/model_tflops_per_gpu"] == pytest.approx(6e6 * per_gpu / 1e12)
    assert record["throughput/mfu"] == pytest.approx(6e6 * per_gpu / 1e12)
    assert record["throughput/hfu"] == pytest.approx(5e6 * per_gpu / 1e12)
    assert record["memory/gradients"] == 3_600_000
    assert record["memory/host_rss"] > 50e6


def test_perplexity_weighs_sources_by_tokens(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    telemetry.log(make_record(1, validated=True))
    telemetry.close()
    record = read_strictly(tmp_path)[0]
    assert record["loss/valid"] == pytest.approx(130 / 50)
    assert record["perplexity/valid"] == pytest.approx(math.exp(130 / 50))
    assert record["perplexity/valid/topics"] == pytest.approx(math.exp(3.0))
    assert record["perplexity/valid/prose"] == pytest.approx(math.exp(2.5))


def test_loss_variance_is_that_of_the_window(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    for step in range(1, 13):
        telemetry.log(make_record(step))
    telemetry.close()
    records = read_strictly(tmp_path)
    losses = [record["loss/train"] for record in records]
    for index, record in enumerate(records):
        window = losses[max(0, index - 4) : index + 1]
        assert record["stability/loss_variance"] == pytest.approx(statistics.pvariance(window), abs=1e-12)


def test_unknown_device_logs_no_utilisation_and_says_so_once(tmp_path: Path) -> None:
    output = io.StringIO()
    telemetry = open_telemetry(tmp_path, facts=make_facts(peak=None), console=Console(file=output))
    for step in range(1, 4):
        telemetry.log(make_record(step))
    telemetry.close()
    assert all(not WITH_PEAK & set(record) for record in read_strictly(tmp_path))
    assert not WITH_PEAK & set(read_scalars(tmp_path))
    assert "throughput/model_tflops_per_gpu" in read_strictly(tmp_path)[0]
    assert output.getvalue().count("peak FLOP/s of device 'cpu' is not known") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_logs_the_allocation_peak(tmp_path: Path) -> None:
    block = torch.ones(1 << 20, device="cuda")
    telemetry = open_telemetry(tmp_path, facts=make_facts(device_name=torch.cuda.get_device_name()))
    telemetry.log(make_record(1))
    telemetry.close()
    assert read_strictly(tmp_path)[0]["memory/allocated_peak"] >= block.nbytes


def test_values_that_are_not_finite_are_null_in_json_and_kept_in_tensorboard(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    for step, loss in enumerate((2.0, math.nan, math.inf, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5), start=1):
        telemetry.log(make_record(step, loss=loss))
    record = make_record(10)
    at_once = replace(record.result, seconds=replace(record.result.seconds, step=0.0))
    telemetry.log(replace(record, result=at_once, validation={"prose": (1e6, 10)}))
    telemetry.close()
    records = read_strictly(tmp_path)
    assert [record["loss/train"] for record in records[:4]] == [2.0, None, None, 3.0]
    variances = [record["stability/loss_variance"] for record in records]
    assert variances[1:7] == [None] * 6 and None not in variances[7:]
    assert records[9]["perplexity/valid"] is None and records[9]["throughput/tokens_per_second"] is None
    losses = dict(read_scalars(tmp_path)["loss/train"])
    assert math.isnan(losses[2]) and losses[3] == math.inf


def test_terms_of_the_loss_are_recorded_apart(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    record = make_record(1)
    telemetry.log(replace(record, result=replace(record.result, auxiliary={"some_penalty": 0.25})))
    telemetry.log(make_record(2))
    telemetry.close()
    first, second = read_strictly(tmp_path)
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
    telemetry = open_telemetry(tmp_path, every=4, total_steps=14)
    for step in range(1, 15):
        telemetry.log(make_record(step, validated=step == 6, seconds_checkpoint=0.1 if step == 7 else None))
    telemetry.close()
    records = read_strictly(tmp_path)
    assert [record["step"] for record in records] == [4, 6, 7, 8, 12, 14]
    assert [step for step, _ in read_scalars(tmp_path)["loss/train"]] == [4, 6, 7, 8, 12, 14]
    # Speed is that of the step itself, also after steps that were not written.
    assert records[3]["throughput/tokens_per_second"] == pytest.approx(1024 / 0.508)


@pytest.mark.parametrize("every", [1, 3])
def test_resumed_equals_uninterrupted(tmp_path: Path, every: int) -> None:
    def log(telemetry: Telemetry, first: int, last: int) -> None:
        for step in range(first, last + 1):
            seconds_checkpoint = 0.2 if step % 8 == 0 else None
            telemetry.log(make_record(step, validated=step == 10, seconds_checkpoint=seconds_checkpoint))
            if seconds_checkpoint is not None:
                telemetry.sync()

    straight = open_telemetry(tmp_path / "straight", every=every)
    log(straight, 1, 20)
    straight.close()
    killed = open_telemetry(tmp_path / "killed", every=every)
    log(killed, 1, 13)  # never closed, as after kill -9
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "tok')
    for first_resumed in (9, 17):
        resumed = open_telemetry(tmp_path / "killed", every=every, resume_step=first_resumed - 1)
        log(resumed, first_resumed, 20)
    resumed.close()
    assert deterministic(read_strictly(tmp_path / "killed")) == deterministic(
        read_strictly(tmp_path / "straight")
    )
    shown, expected = read_scalars(tmp_path / "killed"), read_scalars(tmp_path / "straight")
    del shown[HOST_BYTES.tag], expected[HOST_BYTES.tag]
    assert shown == expected


def test_an_extra_record_at_a_signal_does_not_change_later_variances(tmp_path: Path) -> None:
    straight = open_telemetry(tmp_path / "straight", every=4)
    stopped = open_telemetry(tmp_path / "stopped", every=4)
    for step in range(1, 21):
        straight.log(make_record(step))
    for step in range(1, 11):
        stopped.log(make_record(step, seconds_checkpoint=0.3 if step == 10 else None))
    stopped.close()
    resumed = open_telemetry(tmp_path / "stopped", every=4, resume_step=10)
    for step in range(11, 21):
        resumed.log(make_record(step))
    records = {record["step"]: record for record in deterministic(read_strictly(tmp_path / "stopped"))}
    assert sorted(records) == [4, 8, 10, 12, 16, 20]
    for record in deterministic(read_strictly(tmp_path / "straight")):
        assert records[record["step"]] == record


def test_starting_again_from_the_beginning_drops_everything_old(tmp_path: Path) -> None:
    old = open_telemetry(tmp_path)
    for step in range(1, 8):
        old.log(make_record(step, loss=9.0))
    old.close({"loss/train": 9.0})
    new = open_telemetry(tmp_path, resume_step=0)
    new.log(make_record(1, loss=1.0))
    new.close()
    assert [record["loss/train"] for record in read_strictly(tmp_path)] == [1.0]
    assert read_scalars(tmp_path)["loss/train"] == [(1, 1.0)]


def test_event_files_of_a_faster_clock_are_still_purged(tmp_path: Path) -> None:
    old = open_telemetry(tmp_path)
    for step in range(1, 8):
        old.log(make_record(step, loss=9.0))
    old.close()
    (written,) = (tmp_path / "tensorboard").glob(FILE_PREFIX + "*")
    written.rename(written.with_name(f"{FILE_PREFIX}{int(time.time()) + 3600:010d}.other-host.99999.0"))
    resumed = open_telemetry(tmp_path, resume_step=3)
    for step in range(4, 7):
        resumed.log(make_record(step, loss=1.0))
    resumed.close()
    assert read_scalars(tmp_path)["loss/train"] == [(1, 9), (2, 9), (3, 9), (4, 1), (5, 1), (6, 1)]


# Logs steps as a training loop does, a "checkpoint" every 50 steps, from wherever the last one left off.
KILLED_WRITER = """
import sys, time
from pathlib import Path
from tests.pretrain.telemetry.test_telemetry import make_record, open_telemetry
run, total = Path(sys.argv[1]), int(sys.argv[2])
done = run / "checkpointed"
resume_step = int(done.read_text()) if done.exists() else 0
telemetry = open_telemetry(run, total_steps=total, resume_step=resume_step)
for step in range(resume_step + 1, total + 1):
    due = step % 50 == 0
    telemetry.log(make_record(step, seconds_checkpoint=0.1 if due else None))
    if due:
        telemetry.sync()
        partial = done.with_suffix(".partial")
        partial.write_text(str(step))
        partial.replace(done)
    time.sleep(0.001)
telemetry.close({"loss/train": 1.0})
"""


def test_kill_nine_then_resume_neither_repeats_nor_loses_a_step(tmp_path: Path) -> None:
    total = 600
    command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path), str(total)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    metrics = tmp_path / "metrics.jsonl"
    for steps_before_kill in (30, 330):  # before the first checkpoint, and after some
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment)
        deadline = time.monotonic() + 60
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps_before_kill:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert metrics.read_bytes().count(b"\n") < total
        newest = max((tmp_path / "tensorboard").glob(FILE_PREFIX + "*"))
        with newest.open("ab") as file:  # the kill may also fall in the middle of a record
            file.write(b"\x40\x00\x00\x00\x00\x00\x00\x00half a record")
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=60)
    expected = list(range(1, total + 1))
    assert [record["step"] for record in read_strictly(tmp_path)] == expected
    scalars = read_scalars(tmp_path)
    for tag in ALWAYS | WITH_PEAK:
        assert [step for step, _ in scalars[tag]] == expected
    assert [step for step, _ in scalars["time/checkpoint"]] == list(range(50, total + 1, 50))
    losses = [value for _, value in scalars["loss/train"]]
    assert losses == pytest.approx([make_record(step).result.loss for step in expected], rel=1e-6)


def test_hparams_and_layout_belong_to_the_run_itself(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    telemetry.log(make_record(1, validated=True))
    telemetry.close({"perplexity/valid": 13.0, "loss/train": 5.0})
    telemetry.close()  # a second close is harmless
    assert [path for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()] == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    contents = events.PluginTagToContent("hparams")
    start = plugin_data_pb2.HParamsPluginData.FromString(contents["_hparams_/session_start_info"])
    values = start.session_start_info.hparams
    assert values["attention.variant"].string_value == "orthogonal"
    assert values["optimizer.learning_rate"].number_value == 1e-3
    assert values["model.tied"].string_value == "true"
    experiment = plugin_data_pb2.HParamsPluginData.FromString(contents["_hparams_/experiment"]).experiment
    assert {info.name.tag for info in experiment.metric_infos} == {"perplexity/valid", "loss/train"}
    shown_first = {info.name for info in experiment.hparam_infos if info.differs}
    assert shown_first == {"attention.variant", "optimizer.learning_rate"}
    assert "_hparams_/session_end_info" in contents
    (layout_event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(layout_event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["quality", "throughput", "memory"]
    charts = {chart.title for category in layout.category for chart in category.chart}
    assert {"training loss", "validation loss", "gradient norm", "tokens per second"} <= charts


def test_without_tensorboard_only_metrics_are_written(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path, tensorboard=False)
    telemetry.log(make_record(1))
    telemetry.sync()
    telemetry.close({"loss/train": 1.0})
    assert not (tmp_path / "tensorboard").exists()
    assert len(read_strictly(tmp_path)) == 1


def test_log_file_gets_few_plain_lines(tmp_path: Path) -> None:
    output = io.StringIO()
    telemetry = open_telemetry(tmp_path, console=Console(file=output, width=60), seconds_between_lines=60.0)
    for step in range(1, 21):
        telemetry.log(make_record(step, validated=step == 10))
    telemetry.close()
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/20", "step 10/20", "step 20/20"]
    assert "tokens/s" in lines[0] and "grad norm" in lines[0] and lines[0].endswith(" left")
    assert "perplexity 13.46  (prose 12.18, topics 20.09)" in lines[1]
    assert "\x1b" not in output.getvalue()


def test_terminal_gets_one_progress_bar(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=140)
    telemetry = open_telemetry(tmp_path, console=console)
    for step in range(1, 21):
        telemetry.log(make_record(step))
    telemetry.say("a message of the loop [not markup]")
    telemetry.close()
    assert "20/20" in output.getvalue() and "tokens/s" in output.getvalue()
    assert "a message of the loop [not markup]" in output.getvalue()


def test_resume_without_the_old_records_is_said(tmp_path: Path) -> None:
    output = io.StringIO()
    telemetry = open_telemetry(tmp_path, resume_step=8, console=Console(file=output))
    telemetry.log(make_record(9))
    telemetry.close()
    assert "metrics.jsonl ends at step 0 but the run resumes at step 8" in output.getvalue()
    assert [record["step"] for record in read_strictly(tmp_path)] == [9]


def test_a_step_cannot_be_logged_twice(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    telemetry.log(make_record(1))
    with pytest.raises(ValueError, match="step 1 was logged after step 1"):
        telemetry.log(make_record(1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\nnot json\n{"step": 3}\n', "line 2 is not a JSON object"),
        ('{"step": 1}\n{"loss/train": 2}\n', "line 2 is not a JSON object"),
        ('{"step": 1}\n{"step": 2}\n{"step": 2}\n', "line 3 is step 2 but follows step 2"),
    ],
)
def test_a_damaged_metrics_file_is_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        list(read_metrics(tmp_path / "metrics.jsonl"))
    with pytest.raises(UserError, match=message):
        open_telemetry(tmp_path, resume_step=5)
    assert (tmp_path / "metrics.jsonl").read_text() == text
