"""Mistakes refused at once, before any rank is started.

One sentence, exit code 2, no run directory.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from pretrain.__main__ import _report, app
from pretrain.errors import UserError
from tests.command_line import assert_refused, train
from tests.ranks import ROOT, rank_environment, run_program
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.distributed

REFUSED = {
    "missing data directory": (
        {"data__directory": "nowhere/shards"},
        ("data directory nowhere/shards does not exist", "python -m data_pipeline tokenize"),
    ),
    "vocabulary larger than the tokenizer's": (
        {"model__vocab_size": 1024},
        ("model.vocab_size=1024", "512 tokens", "set model.vocab_size=512"),
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_one_sentence_and_leaves_no_run_directory(
    mistake: str, tiny_shards: Path, tmp_path: Path
) -> None:
    changes, sentence = REFUSED[mistake]
    runs = tmp_path / "runs"
    done = train(tiny_overrides(tiny_shards, runs, "bad", **changes), ranks=1, timeout=60)
    assert_refused(done, *sentence)
    assert done.stdout == ""
    assert not runs.exists()


def run_and_list_imports(
    package: str, words: list[str]
) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run `python -m PACKAGE WORDS`; return what became of it, and the modules it imported."""
    done = run_program([sys.executable, "-X", "importtime", "-m", package, *words])
    return done, {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


OF_DATA = {"datasets", "huggingface_hub", "pyarrow", "pandas", "fsspec", "aiohttp"}
"""What the data pipeline alone needs, and that only where a data set, parquet or a download is."""


@pytest.mark.parametrize("inputs", ["--help", "tokenize --help", "tokenize LINES"])
def test_files_of_text_are_tokenised_without_the_packages_of_data_sets(
    inputs: str, tiny_shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words of a text"}\n' * 9)
    words = inputs.replace("LINES", f"{tmp_path}/a.jsonl").split()
    if "LINES" in inputs:
        words += ["--tokenizer", f"{tiny_shards}/tokenizer.model", "--name", "x"]
        words += ["--out", f"{tmp_path}/out"]
    done, imported = run_and_list_imports("data_pipeline", words)
    assert done.returncode == 0, done.stderr
    assert "data_pipeline.errors" in imported
    assert not {name.partition(".")[0] for name in imported} & (OF_DATA | {"torch"})


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--help", None),
        ("show demo", None),
        ("plan large --gpus 16", None),
        ("list variants", None),
        ("train demo model.hiden_size=32", "unknown key 'model.hiden_size'"),
        ("train demo", "start that many with torchrun or srun, or here with --local-ranks 2"),
        ("show demo --tensors --meanings", "so --meanings has none to explain"),
        ("compare nothing-here", "nothing-here"),
        ("export nothing-here --out nothing", "nothing-here is not a run directory"),
        ("evaluate diversity nothing-here", "nothing-here is not a run directory"),
    ],
)
def test_a_quick_answer_imports_nothing_that_takes_seconds(line: str, sentence: str | None) -> None:
    done, imported = run_and_list_imports("pretrain", line.split())
    assert done.returncode == (2 if sentence else 0) and (sentence or "") in done.stderr
    assert "pretrain.errors" in imported
    slow = {"torch", "deepspeed", "megatron", "transformers", "scipy", "matplotlib", "tensorboard"}
    assert not {name.partition(".")[0] for name in imported} & (slow | OF_DATA)


@pytest.mark.parametrize("line", ["pretrain list variants", "pretrain show demo"])
def test_an_output_that_is_full_is_one_sentence(line: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", *line.split()],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    said = "error: standard output cannot be written (No space left on device)\n"
    assert done.stderr == said


def test_a_job_is_told_what_is_refused_again_but_not_what_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = tmp_path / "refused"
    monkeypatch.setenv("ORA_REFUSAL", str(refused))
    _report(UserError("rank 1 has not written its part", passing=True))
    assert not refused.exists()
    _report(UserError("loss is nan"))
    assert refused.read_text() == "loss is nan\n"
    monkeypatch.setenv("ORA_REFUSAL", "/dev/full")
    _report(UserError("the sentence is not lost"))
    said = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]
    assert said == ["rank 1 has not written its part", "loss is nan", "the sentence is not lost"]


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_training_that_compiles_nothing_imports_no_compiler(
    dtype: str, tiny_shards: Path, tmp_path: Path
) -> None:
    settings = {"precision__dtype": dtype, "schedule__steps": 3, "checkpoint__every": 3}
    overrides = tiny_overrides(tiny_shards, tmp_path, "plain", **settings)
    done, imported = run_and_list_imports("pretrain", ["train", "demo", *overrides])
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("finished"), (
        done.stderr[-2000:]
    )
    prefixes = ("telemetry: ", str(tmp_path), "step ", "finished: ")
    assert [line for line in done.stdout.splitlines() if not line.startswith(prefixes)] == []
    assert {"torch", "megatron.core", "deepspeed"} <= imported
    assert not imported & {"torch._dynamo", "torch._inductor", "triton.language", "boto3.session"}
    of_torch = {"fsspec"}
    assert not {name.partition(".")[0] for name in imported} & (OF_DATA - of_torch)


@pytest.mark.slow
def test_a_training_leaves_at_once_after_its_last_line(tiny_shards: Path, tmp_path: Path) -> None:
    """In seconds of its own.

    Freeing torch and the rest, module by module, would take one and a half.
    """
    overrides = tiny_overrides(
        tiny_shards, tmp_path, "short", schedule__steps=2, schedule__warmup_steps=1
    )
    command = [sys.executable, "-m", "pretrain", "train", "demo", *overrides]
    with psutil.Popen(
        command, cwd=ROOT, env=rank_environment(), stdout=subprocess.PIPE, text=True
    ) as training:
        last = next(line for line in training.stdout if line.startswith("finished: "))
        cpu_seconds = sum(training.cpu_times()[:2])
        _, status, used = os.wait4(training.pid, 0)
    assert last == f"finished: {tmp_path / 'short'}\n" and status == 0
    assert used.ru_utime + used.ru_stime - cpu_seconds < 0.7


@pytest.mark.parametrize("package", ["pretrain", "data_pipeline", "megatron_patches"])
def test_outside_the_environment_a_command_says_how_to_enter_it(package: str) -> None:
    command = [sys.executable, "-S", "-m", package]  # without any installed package
    done = run_program(command, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "has no typer" in done.stderr and "source .venv/bin/activate" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "compare RUN",
        "diff RUN RUN",
        "evaluate approximation",
        "evaluate diversity RUN",
        "evaluate glue RUN --data RUN --tasks rte",
        "evaluate length RUN",
        "evaluate reservoir RUN --data RUN",
        "evaluate tasks RUN --tasks arc_easy",
        "replay RUN",
        "trial RUN",
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    line: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    for out in (file, file / "below"):
        words = line.replace("RUN", str(tmp_path / "none")).split()
        done = CliRunner().invoke(app, [*words, "--out", str(out)])
        assert str(done.exception) == (
            f"--out {out} cannot be written: {file} is not a directory; name another directory"
        )
