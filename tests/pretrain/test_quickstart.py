"""`try` and `demo`.

What follows from the text, the cores and the time, and what is refused at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data_pipeline.errors import DataError
from pretrain.__main__ import app
from pretrain.config.load import load_config
from pretrain.config.sources import override_text
from pretrain.errors import UserError
from pretrain.quickstart import (
    LEAST_BYTES,
    SIZES,
    Trial,
    _grid,
    _said,
    _write_grid,
    parameters,
    plan_sizes,
)
from pretrain.sweep.grid import expand, read_grid

WORDS = "It was the best of times, it was the worst of times.\n\n"


def text_file(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((WORDS * (size // len(WORDS) + 1))[:size])
    return path


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, (UserError, DataError)), result.output
    return str(result.exception)


def planned(size: int, cores: int, minutes: float, **own: Any) -> Trial:
    settings, of_tokenizer, of_shards = plan_sizes(size, cores, minutes)
    return Trial(
        texts=("x",),
        name="text",
        designs=("vanilla", "shared_conv4"),
        jobs=2,
        local_ranks=1,
        of_tokenizer=of_tokenizer,
        of_shards=of_shards,
        settings=settings | own,
    )


def test_more_time_and_more_cores_train_on_more_tokens_but_few_texts_are_not_read_for_ever() -> (
    None
):
    steps = [
        planned(size, cores, minutes).settings["schedule.steps"]
        for size, cores, minutes in (
            (10**7, 2, 4),
            (10**7, 2, 20),
            (10**7, 8, 20),
            (400_000, 8, 20),
        )
    ]
    assert steps[0] < steps[1] < steps[2] > steps[3]
    few = planned(LEAST_BYTES, 64, 600)
    assert few.settings["schedule.steps"] * 8 * 128 < 11 * LEAST_BYTES / 2.7 / 2
    assert planned(10**9, 64, 24 * 60).settings["model.hidden_size"] == SIZES[-1][1]
    assert few.settings["model.hidden_size"] == SIZES[0][1]


def test_the_fewer_the_documents_the_more_of_them_are_held_out() -> None:
    """About eight of texts that are cut, at most half."""
    options = [planned(size, 2, 4).of_shards[0] for size in (LEAST_BYTES, 10**6, 10**7, 10**9)]
    fractions = [float(fraction.partition("=")[2]) for fraction in options]
    assert fractions == [0.5, round(8 * 16_384 / 10**6, 3), 0.05, 0.05]


def test_the_default_is_done_in_five_minutes_on_two_cores_at_half_the_demos_speed() -> None:
    """`make demo` trained 2 × 491,520 tokens of 1.3 M parameters in about 150 s.

    That is 6.5e3 tokens a second.
    """
    trial = planned(3_000_000, 2, 4)
    tokens = 2 * trial.settings["schedule.steps"] * 8 * 128
    assert parameters(4, 128, 4096) == 1_310_720
    assert tokens / 6.5e3 < 5 * 60 - 75


def test_the_sweep_is_one_that_the_program_takes(tmp_path: Path) -> None:
    trial = planned(10**6, 2, 4, **{"schedule.steps": 7, "schedule.warmup_steps": 1})
    grid = _grid(trial, tmp_path)
    runs = expand(read_grid(str(_write_grid(grid, tmp_path))))
    assert [run.name for run in runs] == ["vanilla", "shared_conv4"]
    configs = [load_config("demo", run.overrides()) for run in runs]
    assert [config.run_path for config in configs] == [tmp_path / "runs" / run.name for run in runs]
    assert all(config.total_steps == 7 for config in configs)
    assert configs[0].policy.trainable and not configs[1].policy.trainable
    assert configs[1].attention.adapters == ("short_convolution", "query_key_bias", "channel_scale")
    assert configs[1].optimizer.learning_rate_factors == {"*_taps": 3, "*.log_scale": 3}
    assert _said(trial, grid).startswith(
        "vanilla beside shared_conv4:\n4 layers of 128, about 1.3 M parameters, 7 "
    )
    _write_grid(grid, tmp_path)  # again: goes on
    with pytest.raises(
        UserError,
        match=r"^\S*/sweep.yaml is of another size of text.*; give another --out, or delete \S*$",
    ):
        _write_grid(_grid(planned(10**6, 2, 9), tmp_path), tmp_path)


def test_the_demo_is_the_config_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs are those that pages name: what an older `make demo` has trained stays trained."""
    monkeypatch.chdir(tmp_path)
    trials: list[Trial] = []
    monkeypatch.setattr("pretrain.quickstart.run_trial", lambda trial, *_: trials.append(trial))
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
    (trial,) = trials
    runs = expand(read_grid(str(_write_grid(_grid(trial, Path("demo")), Path("demo")))))
    for run, variant in zip(runs, ("vanilla", "orthogonal"), strict=True):
        plain = [override_text("attention.variant", variant), f"run.name={variant}"]
        assert (
            load_config("demo", run.overrides()).as_dict() == load_config("demo", plain).as_dict()
        )


def test_what_is_refused_before_it_starts(tmp_path: Path) -> None:
    text = text_file(tmp_path / "in/t.md", 400_000)
    out = tmp_path / "out"

    def said(given: Path, *options: str, to: Path = out) -> str:
        return refused("try", str(given), *options, f"--out={to}")

    short = said(text_file(tmp_path / "s.txt", 50_000))
    assert short.endswith("s.txt: 0.05 MB of text are too little; give 0.2 MB at least")
    assert "did you mean 'shared_conv4'?" in said(text, "--design=shared_conv")
    assert "choose another" in said(text, "--design=vanilla")
    assert "schedule.step" in said(text, "--set=schedule.step=5")
    assert "lies inside the input directory" in said(text.parent, to=text.parent / "out")
    assert "is a Word document, not text" in said(text_file(tmp_path / "x.docx", 10))
    assert "unknown ending" in said(text_file(tmp_path / "x.log", 10))
    assert "does not exist" in said(tmp_path / "none.txt")
    assert not out.exists()
    out.write_text("a file")
    assert "cannot be used" in said(text)
