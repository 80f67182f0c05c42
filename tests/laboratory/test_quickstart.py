"""`try` and `demo`.

What follows from the text, the cores and the time, and what is refused at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from data_pipeline.errors import DataError
from data_pipeline.sources.discovery import find_inputs
from laboratory.quickstart.arms import SPELLED_OUT, choose_arms, named_designs
from laboratory.quickstart.sizes import SIZES, parameters, plan_sizes, training_seconds
from laboratory.quickstart.texts import linked, survey
from laboratory.quickstart.trial import Trial, _grid, _training_sentence, _write_grid
from laboratory.quickstart.verbs import LEAST_BYTES
from laboratory.sweep.grid import expand, read_grid
from megatron_patches.recipe.variants import LEADING
from pretrain.__main__ import app
from pretrain.config.load import load_config
from pretrain.config.sources import override_text
from pretrain.errors import UserError
from tests.data_pipeline.helpers import run as run_data

WORDS = "It was the best of times, it was the worst of times.\n\n"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """The trials that the verbs would run."""
    caught: list[Trial] = []
    verb = "laboratory.quickstart.verbs.run_trial"
    monkeypatch.setattr(verb, lambda trial, *_: caught.append(trial))
    return caught


def text_file(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((WORDS * (size // len(WORDS) + 1))[:size])
    return path


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, (UserError, DataError)), result.output
    return str(result.exception)


def planned(size: int, cores: int, minutes: float, **overrides: Any) -> Trial:
    # Three runs, two at a time.
    options = plan_sizes(size, cores / 2, training_seconds(minutes) / 2)
    settings, of_tokenizer, of_shards = options
    return Trial(
        texts=("x",),
        name="text",
        arms=choose_arms(LEADING),
        jobs=2,
        local_ranks=1,
        of_tokenizer=of_tokenizer,
        of_shards=of_shards,
        settings=settings | overrides,
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


def test_a_vocabulary_that_is_given_is_that_of_tokenizer_and_model() -> None:
    settings, of_tokenizer, _ = plan_sizes(2 * 10**6, 1, 165, 374)
    assert settings["model.vocab_size"] == 374 and "--vocab-size=374" in of_tokenizer


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
    rounds = 2
    tokens = 2 * rounds * trial.settings["schedule.steps"] * 8 * 128
    assert parameters(4, 128, 4096) == 1_310_720
    assert tokens / 6.5e3 < 5 * 60 - 75


def test_the_sweep_is_one_that_the_program_takes(tmp_path: Path) -> None:
    trial = planned(10**6, 2, 4, **{"schedule.steps": 7, "schedule.warmup_steps": 1})
    grid = _grid(trial, tmp_path)
    runs = expand(read_grid(str(_write_grid(grid, tmp_path))))
    assert [run.name for run in runs] == ["vanilla", "vanilla_conv4", LEADING]
    configs = [load_config("demo", run.overrides()) for run in runs]
    assert [config.run_path for config in configs] == [tmp_path / "runs" / run.name for run in runs]
    assert all(config.total_steps == 7 for config in configs)
    assert [config.policy.trainable for config in configs] == [True, True, False]
    # The frozen design and its baseline differ in queries and keys alone.
    assert trial.arms.baseline == "vanilla_conv4"
    assert configs[1].policy.adapters == configs[2].policy.adapters != ()
    entry = named_designs()[SPELLED_OUT].items()
    spelled_out = [override_text(key, value) for key, value in entry if key != "name"]
    assert configs[2].policy == load_config("demo", spelled_out).policy
    for config in configs[1:]:
        assert config.optimizer.learning_rate_factors == {"*_taps": 3, "*.log_scale": 3}
    lines = _training_sentence(trial, grid).splitlines()
    assert lines[0] == f"vanilla beside vanilla_conv4 beside {LEADING}:"
    assert lines[1].startswith("vanilla_conv4 is vanilla with the adapters short_convolution, ")
    assert lines[2].endswith("and the same adapters: the page compares it with vanilla_conv4")
    assert lines[3].startswith("4 layers of 128, about 1.3 M parameters, 7 ")
    _write_grid(grid, tmp_path)  # again: goes on
    with pytest.raises(
        UserError,
        match=r"^\S*/sweep.yaml is of another size of text.*; give another --out, or delete \S*$",
    ):
        _write_grid(_grid(planned(10**6, 2, 9), tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("design", "names", "baseline"),
    [
        ("orthogonal", ["vanilla", "orthogonal"], "vanilla"),
        ("vanilla_conv4", ["vanilla", "vanilla_conv4"], "vanilla"),
        ("shared", ["vanilla", "vanilla_channel_scale", "shared"], "vanilla_channel_scale"),
        (
            "trained_shared_conv4",
            ["vanilla", "vanilla_conv4", "trained_shared_conv4"],
            "vanilla_conv4",
        ),
    ],
)
def test_a_design_is_compared_with_what_differs_in_one_thing(
    design: str, names: list[str], baseline: str
) -> None:
    arms = choose_arms(design)
    assert (list(arms.names), arms.baseline) == (names, baseline)


@pytest.mark.parametrize("design", [*list(named_designs())[1:]])
def test_every_design_has_a_baseline_with_its_adapters(design: str) -> None:
    arms = choose_arms(design)
    policies = {}
    rates = {}
    for name, entry in zip(arms.names, arms.entries, strict=True):
        overrides = [override_text(key, value) for key, value in entry.items() if key != "name"]
        config = load_config("demo", overrides)
        policies[name] = config.policy
        rates[name] = config.optimizer.learning_rate_factors
    assert policies[arms.baseline].trainable and not policies[arms.baseline].shared
    if arms.baseline != "vanilla":
        assert policies[design].adapters == policies[arms.baseline].adapters
        assert rates[design] == rates[arms.baseline]


def test_the_demo_is_the_config_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: list[Trial]
) -> None:
    """Its runs are those that pages name: what an older `make demo` has trained stays trained."""
    monkeypatch.chdir(tmp_path)
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

    def said(path: Path, *options: str, to: Path = out) -> str:
        return refused("try", str(path), *options, f"--out={to}")

    short = said(text_file(tmp_path / "s.txt", 50_000))
    assert short.endswith("s.txt: 50 kB of text are too little; give 200 kB at least")
    book = tmp_path / "b.txt"
    book.write_bytes(b"%PDF-1.4\n" + bytes(range(256)) * 2_000)
    assert "b.txt: 0 kB of text are too little (not read (the file is a PDF, not" in said(book)
    assert "did you mean 'shared_conv4'?" in said(text, "--design=shared_conv")
    assert "choose another" in said(text, "--design=vanilla")
    assert "schedule.step" in said(text, "--set=schedule.step=5")
    assert "--design chooses it" in said(text, "--set=attention.variant=gaussian")
    assert "--out places everything" in said(text, "--set=run.name=x")
    assert "give a whole number" in said(text, "--set=model.vocab_size=many")
    assert "lies inside the input directory" in said(text.parent, to=text.parent / "out")
    assert "is a Word document, not text" in said(text_file(tmp_path / "x.docx", 10))
    assert "unknown ending" in said(text_file(tmp_path / "x.log", 10))
    assert "does not exist" in said(tmp_path / "none.txt")
    assert not out.exists()
    out.write_text("a file")
    assert "cannot be used" in said(text)


def test_a_damaged_text_does_not_end_a_trial(tmp_path: Path, trials: list[Trial]) -> None:
    text_file(tmp_path / "in/good.txt", 300_000)
    (tmp_path / "in/bad.txt").write_bytes(b"good\n\nbad \xff")
    command = ["try", str(tmp_path / "in"), f"--out={tmp_path / 'out'}"]
    assert CliRunner().invoke(app, command).exit_code == 0
    (trial,) = trials
    model = ("--tokenizer", tmp_path / "t.model", "--name", "x", "--out", tmp_path / "shards")
    small = ("--out", tmp_path / "t", *trial.of_tokenizer, "--vocab-size=300")
    for verb in (("train-tokenizer", *small), ("tokenize", *model, *trial.of_shards)):
        outcome = run_data(verb[0], *trial.texts, *verb[1:])
        assert outcome.code == 0 and "damaged input bad.txt" in outcome.err


def test_the_key_of_the_text_is_said_and_files_without_text_are_left_out(tmp_path: Path) -> None:
    """A PDF among texts by another name, and records of which some have other keys."""
    (tmp_path / "records.jsonl").write_text('{"title": "t"}\n{"content": "a"}\n')
    table = pyarrow.table({"id": [1], "content": ["a"]})
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    text_file(tmp_path / "plain.txt", 1000)
    (tmp_path / "book.txt").write_bytes(b"%PDF-1.4\n\xff")
    read, said, _ = survey(find_inputs([tmp_path]).files, "text|content", [str(tmp_path)])
    assert [file.name for file in read] == ["plain.txt", "records.jsonl", "table.parquet"]
    assert said[0] == "text is read from the key `content`"
    assert said[1].startswith("not read (the file is a PDF, not text; convert it: pdftotext ")
    assert said[1].endswith("): book.txt") and len(said) == 2
    (tmp_path / "more.jsonl").write_text('{"text": "a"}\n')
    said = survey(find_inputs([tmp_path]).files, "text|content", [str(tmp_path)])[1]
    assert said[0] == "text is read from the keys `content` (of 2) and `text` (of 1)"


def test_of_a_data_set_the_beginning_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: list[Trial]
) -> None:
    monkeypatch.setattr("laboratory.quickstart.texts.MOST_BYTES", 300_000)
    rows = [f"{n} {WORDS}" for n in range(9000)]
    (tmp_path / "a.csv").write_text("id,body\n" + "".join(f'1,"{row}"\n' for row in rows))
    command = ["try", f"csv:{tmp_path}/a.csv", f"--out={tmp_path / 'out'}"]
    for _ in range(2):  # again: the same file
        assert CliRunner().invoke(app, command).exit_code == 0
    assert trials[0] == trials[1]
    (text,) = trials[0].texts
    lines = Path(text).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": row} for row in rows[: len(lines)]]
    assert 300_000 <= Path(text).stat().st_size < 301_000
    assert 'has no column "title", it has id, body; name' in refused(*command, "--text-key=title")
    assert "is a table; give csv:FILE" in refused("try", f"{tmp_path}/a.csv")


def test_a_table_without_text_is_left_out_below_a_directory_alone(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / "below").mkdir(parents=True)
    text_file(texts / "below/plain.txt", 1000)
    table = texts / "below/losses.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"name": ["a"], "loss": [1]}), table)
    read, said, tables = survey(find_inputs([texts]).files, "text|content", [str(texts)])
    assert said == ["not read (no column of the text): below/losses.parquet"] and tables == 1
    links = linked(read, tmp_path / "out")
    assert [file.name for file in find_inputs([links]).files] == ["below/plain.txt"]
    assert linked(read, tmp_path / "out") == links
    with pytest.raises(DataError, match='has no column "text" or "content"'):
        survey(find_inputs([table]).files, "text|content", [str(table)])
