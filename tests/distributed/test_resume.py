"""Interrupted and resumed equals uninterrupted, bit for bit.

fp32, CPU, data parallel 2, alone and × tensor parallel 2, ZeRO 1, 2 and 3.
"""

import hashlib
import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from laboratory.study.seal import write_seal
from pretrain.runs.seals import content_digest
from tests.command_line import (
    assert_same_checkpoint,
    checkpoint_tensors,
    deterministic_metrics,
    held_before,
    logged_steps,
    started,
    wait_until,
)
from tests.fabricated_seals import made_seal
from tests.ranks import function_on_warm_ranks, train_to_end
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.timeout(1200)
STEPS, EVERY = 10, 4


def overrides_for(tiny_shards: Path, runs: Path, name: str, stage: int, ranks: int) -> list[str]:
    return tiny_overrides(
        tiny_shards,
        runs,
        name,
        attention__variant="orthogonal",
        # the dropout masks of a resumed step must be those of the uninterrupted one
        model__dropout=0.1,
        deepspeed__config=f"zero{stage}",
        parallel__tensor_model_parallel_size=ranks // 2,
        schedule__steps=STEPS,
        checkpoint__every=EVERY,
        data__validate_every=STEPS // 2,
    )


@pytest.fixture(scope="module")
def uninterrupted(
    tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return the function from a ZeRO stage to its run's directory, which the first call trains."""
    runs = tmp_path_factory.mktemp("uninterrupted")

    @cache
    def trained(stage: int, ranks: int = 4) -> Path:
        name = f"zero{stage}-{ranks}"
        overrides = overrides_for(tiny_shards, runs, name=name, stage=stage, ranks=ranks)
        train_to_end(overrides, ranks)
        return runs / name

    return trained


def assert_same_run(run: Path, reference: Path, resumed_after: int) -> None:
    segments = json.loads((run / "environment.json").read_text())["segments"]
    assert segments[-1]["first_step"] == resumed_after + 1  # trained anew it would be the same, too
    assert (run / "state").read_text() == "finished\n"
    assert logged_steps(run) == list(range(1, STEPS + 1))
    assert deterministic_metrics(run) == deterministic_metrics(reference)
    last = f"checkpoints/step_{STEPS:08d}"
    assert_same_checkpoint(run / last, reference / last, more_than=50)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for tag in ("loss/train", "optim/grad_norm"):
        assert [event.step for event in events.Scalars(tag)] == list(range(1, STEPS + 1))


# A new interpreter for each rank of a start: what differs least from the others is left to `full`.
# In test_designs.py warm ranks stop and go on under every stage and with every kind of attention.
FULL = pytest.mark.full


@pytest.mark.parametrize("stage", [pytest.param(1, marks=FULL), pytest.param(2, marks=FULL), 3])
def test_kill_before_and_during_saves_then_resume(
    stage: int, uninterrupted: Callable[..., Path], tiny_shards: Path, tmp_path: Path
) -> None:
    run = tmp_path / "killed"
    overrides = overrides_for(tiny_shards, tmp_path, "killed", stage, ranks=4)

    def killed_at(path_part: str) -> None:
        payload = {"overrides": overrides, "place": path_part}
        done = function_on_warm_ranks(4, "tests.distributed.workers.saving:killed_at_open", payload)
        assert done.returncode != 0, f"nobody opened {path_part}"

    second_save = run / f"checkpoints/step_{2 * EVERY:08d}"
    killed_at(f"{second_save.name}/")
    assert logged_steps(run) and not (second_save / "COMPLETE").exists()
    killed_at(f"{second_save.name}/checkpoint.json.")  # a temporary name, after every rank's file
    assert list(second_save.glob("*.safetensors")) and not (second_save / "COMPLETE").exists()

    train_to_end(overrides, ranks=4)
    assert_same_run(run, uninterrupted(stage), EVERY)


@pytest.mark.parametrize(
    ("number", "state"),
    [
        (signal.SIGTERM, "stopped\n"),
        pytest.param(signal.SIGUSR1, "continue\n", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "stopped\n", marks=FULL),
        pytest.param(signal.SIGHUP, "stopped\n", marks=FULL),
        pytest.param(signal.SIGXCPU, "continue\n", marks=FULL),
    ],
)
def test_signal_saves_exits_0_and_resumes_exactly(
    number: signal.Signals,
    state: str,
    uninterrupted: Callable[..., Path],
    tiny_shards: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "signalled"
    overrides = overrides_for(tiny_shards, tmp_path, "signalled", stage=1, ranks=2)
    with started(overrides, 2, tmp_path / "log", held_before(3)) as launcher:
        wait_until(lambda: 2 in logged_steps(run), launcher, "step 2")
        launcher.send_signal(number)
        assert launcher.wait(timeout=60) == 0, (tmp_path / "log").read_text()
    stopped_at = max(logged_steps(run))
    assert (run / "state").read_text() == state
    assert stopped_at < EVERY and (run / f"checkpoints/step_{stopped_at:08d}/COMPLETE").is_file()

    train_to_end(overrides, ranks=2)
    assert_same_run(run, uninterrupted(1, ranks=2), stopped_at)


def test_another_content_of_the_deepspeed_file_and_seals_are_recorded(
    tiny_shards: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "mine.json"
    content = made_seal(5).sealed.model_dump(exclude={"commit", "sealed"}, mode="json")
    seal = write_seal(tmp_path, content, [])
    assert seal is not None
    changes: dict[str, object] = {"deepspeed__config": settings, "checkpoint__every": 2}
    for steps, more in ((2, {}), (4, {}), (6, {"gradient_predivide_factor": 2.0})):
        settings.write_text(json.dumps({"zero_optimization": {"stage": 1}, **more}))
        overrides = tiny_overrides(tiny_shards, tmp_path, "run", **changes, schedule__steps=steps)
        done = train_to_end(overrides, ranks=1)
        if steps == 4:
            seal.path.unlink()
    digest = hashlib.sha256(settings.read_bytes()).hexdigest()
    assert f"; from step 5 on the content of deepspeed.config is {digest}, was " in done.stdout
    segments = json.loads((tmp_path / "run/environment.json").read_text())["segments"]
    changed = ["the content of deepspeed.config" in segment["changes"] for segment in segments]
    assert changed == [False, False, True]
    assert [segment["seals"] for segment in segments] == 2 * [[content_digest(seal.raw)]] + [[]]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=FULL), pytest.param(2, marks=FULL), 3])
def test_keep_last_and_frozen_bank_not_in_checkpoints(
    stage: int, uninterrupted: Callable[..., Path]
) -> None:
    run = uninterrupted(stage)
    kept = sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())
    assert kept == [f"step_{2 * EVERY:08d}", f"step_{STEPS:08d}"]
    assert (run / "checkpoints/latest").read_text() == f"step_{STEPS:08d}\n"
    tensors = checkpoint_tensors(run / f"checkpoints/step_{STEPS:08d}")
    assert not [key for key in tensors if "query_key" in key]
    masters = {key: tensor for key, tensor in tensors.items() if key.startswith("master/")}
    assert {t.numel() for key, t in masters.items() if "value_weight" in key} == {32 * 32}
    elements = json.loads((run / "audit.json").read_text())["totals"]["model_trainable_parameters"]
    assert sum(master.numel() for master in masters.values()) == elements
    files = list((run / f"checkpoints/step_{STEPS:08d}").glob("*.safetensors"))
    assert len(files) == 4
    assert sum(file.stat().st_size - _head(file) for file in files) == 12 * elements


def _head(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")
