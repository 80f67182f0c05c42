"""Losses of anybody's runs: files of every format, refusals, and the statistics of `compare`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from laboratory.compare.loss_files import by_model, read_losses, split_seed
from laboratory.compare.losses import LossComparison, compare_losses
from laboratory.study.sequential import decide
from pretrain.errors import UserError
from tests.ranks import ROOT

BASE = [3.312, 3.298, 3.305, 3.321, 3.300]
OTHER = [3.401, 3.377, 3.390, 3.396, 3.372]
LOSSES = {"trained": dict(enumerate(BASE, start=1)), "frozen": dict(enumerate(OTHER, start=1))}
TABLE = "name,seed,loss\n" + "".join(
    f"{name},{seed},{loss}\n" for name, by_seed in LOSSES.items() for seed, loss in by_seed.items()
)


def file(directory: Path, text: str, name: str = "losses.csv") -> str:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def state(*records: dict[str, Any]) -> str:
    """A trainer_state.json as Hugging Face writes it."""
    return json.dumps({"epoch": 1.0, "global_step": 500, "log_history": records}, indent=2)


def events(
    directory: Path, *values: tuple[int, str, float], suffix: str = "", session: int | None = None
) -> str:
    """Write an event file, that of an attempt from step `session` on if it marks its start."""
    writer = EventFileWriter(str(directory), filename_suffix=suffix)
    if session is not None:
        mark = SessionLog(status=SessionLog.START)
        writer.add_event(Event(step=session, session_log=mark))
    for step, tag, value in values:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(step=step, summary=summary))
    writer.close()
    return str(directory)


def rounded_losses(*sources: str, **options: Any) -> dict[str, dict[int, float]]:
    read = by_model(read_losses(sources, **options))
    return {name: {s: round(v, 5) for s, v in by_seed.items()} for name, by_seed in read.items()}


def test_the_statistics_are_those_of_scipy(tmp_path: Path) -> None:
    comparison = compare_losses([file(tmp_path, TABLE)], out=tmp_path / "out")
    gap = comparison.gaps["frozen"]
    test = stats.ttest_rel(OTHER, BASE)
    assert (comparison.baseline, gap.n) == ("trained", 5) and gap.significance_claimed
    assert gap.t_p == pytest.approx(test.pvalue) and gap.t_p_holm == gap.t_p
    assert [gap.low, gap.high] == pytest.approx([*test.confidence_interval()])
    written = json.loads((tmp_path / "out/comparison.json").read_text())
    assert written["losses"]["frozen"] == {str(s): v for s, v in LOSSES["frozen"].items()}
    assert written["gaps_in_nats"]["frozen"]["mean"] == pytest.approx(gap.mean)
    page = (tmp_path / "out/report.html").read_text()
    assert "+0.0800 nats per token" in page and "<svg" in page
    assert compare_losses(LOSSES).gaps == comparison.gaps


@pytest.mark.parametrize(
    "text",
    [
        TABLE.replace(",", ";"),
        "\ufeff" + TABLE.replace("loss", "eval/loss").replace("name", "Name"),
        "name,seed,val_loss,notes\n"
        + "".join(f"{n},{s}.0,{v},\n" for n, by_seed in LOSSES.items() for s, v in by_seed.items()),
        "\n".join(
            json.dumps({"model": name, "config.seed": seed, "epoch": 1, "loss": loss})
            for name, by_seed in LOSSES.items()
            for seed, loss in by_seed.items()
        ),
        "run,loss\n"
        + "".join(
            f"{n}-seed_{s},{v}\n" for n, by_seed in LOSSES.items() for s, v in by_seed.items()
        ),
        '"Step",'
        + ",".join(f'"{n} seed={s} - val/loss"' for n, by_seed in LOSSES.items() for s in by_seed)
        + ',"trained seed=1 - val/loss__MIN"\n0'
        + ",9" * 11
        + "\n100"
        + "".join(f",{v}" for by_seed in LOSSES.values() for v in by_seed.values())
        + ",1\n200"
        + "," * 11
        + "\n",
    ],
    ids=["semicolons", "runs of W&B", "a further column", "JSON lines", "no column seed", "chart"],
)
def test_tables_and_charts_are_read(text: str, tmp_path: Path) -> None:
    assert rounded_losses(file(tmp_path, text)) == LOSSES


def test_metric_files_of_other_trainers_are_read(tmp_path: Path) -> None:
    first = {"loss": 9.0, "step": 100}
    last = {"train_loss": 4.0, "step": 500}
    history = state(first, {"eval_loss": 3.5, "step": 250}, {"eval_loss": 3.25, "step": 500}, last)
    places = [
        file(tmp_path, history, "a-seed1/checkpoint-500/trainer_state.json"),
        str(Path(file(tmp_path, history, "a-seed2/trainer_state.json")).parent),
        f"a:3={file(tmp_path, history, 'third.json')}",
        events(tmp_path / "a/seed_4", (500, "eval/loss", 3.25), (250, "eval/loss", 9.0)),
        file(tmp_path, "epoch,step,val_loss,eval_loss\n0,9,,3.5\n0,9,1.0,\n1,500,,3.25\n", "l.csv"),
    ]
    places[-1] = f"a:5={places[-1]}"
    assert rounded_losses(*places, metric="eval_loss") == {"a": dict.fromkeys(range(1, 6), 3.25)}
    assert rounded_losses(*places[:4]) == {"a": dict.fromkeys(range(1, 5), 3.25)}
    assert rounded_losses(places[0], metric="train_loss") == {"a": {1: 4.0}}


def test_this_program_s_own_records_end_at_their_last_validation(tmp_path: Path) -> None:
    path = tmp_path / "main-seed_1" / "metrics.jsonl"
    path.parent.mkdir()
    lines = ['{"step": 1, "loss/valid": 5.5}', '{"step": 2, "loss/train": 5.0}']
    path.write_text("\n".join(lines))
    assert [loss.value for loss in read_losses([str(path)])] == [5.5]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a-seed1.jsonl",
            '{"step": 1, "loss/valid": 5.5}\n{"step": 2}\n{"step": 3, "loss/valid": null}',
            "line 3: loss/valid is null",
        ),
        (
            "trainer_state.json",
            state({"step": 1, "eval_loss": 3.5}, {"step": 2, "eval_loss": None}, {"step": 2}),
            "record 2: eval_loss is null",
        ),
        ("a-seed1.csv", "step,eval_loss\n1,3.5\n2,\n", "line 3: eval_loss is empty"),
        ("a-seed1.csv", "step,loss,eval_loss\n1,4,3.5\n2,4,\n", "line 3: eval_loss is empty"),
        ("a-seed1.csv", "step,loss,eval_loss\n1,4,\n2,,3.5\n3,,\n", "line 4: eval_loss is empty"),
        ("a-seed1.csv", "step,loss,eval_loss\n1,4,\n2,4,\n", "line 2: eval_loss is empty"),
    ],
)
def test_a_curve_that_ends_in_nothing_is_not_judged_by_the_value_before(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"{said}, not a finite loss"):
        read_losses([file(tmp_path, text, f"a-seed1/{name}")])


def test_rows_of_something_else_behind_the_last_loss_are_not_its_end(tmp_path: Path) -> None:
    """As loggers write them that have a row for each kind of metric."""
    text = "epoch,step,loss,val_loss\n0,1,4,\n0,1,,3.5\n0,2,3.9,\n"
    assert rounded_losses(f"a:1={file(tmp_path, text)}") == {"a": {1: 3.5}}
    rows = [{"step": 1, "eval_loss": None}, {"step": 2, "eval_loss": 3.5}, {"step": 2, "loss": 4}]
    assert rounded_losses(f"a:1={file(tmp_path, state(*rows))}") == {"a": {1: 3.5}}


def test_a_loss_of_a_byte_is_shown_in_bits() -> None:
    bits = {name: {s: v / 3 for s, v in by_seed.items()} for name, by_seed in LOSSES.items()}
    gap = compare_losses(bits, unit="bits").gaps["frozen"]
    assert gap.scale.signed(gap.mean) == "+0.0267"
    assert gap.perplexity_ratio == pytest.approx(math.exp(0.08 / 3 * math.log(2)))


def asked(question: str, margin: float, sequential: bool = False) -> LossComparison:
    return compare_losses(LOSSES, question=question, margin=margin, sequential=sequential)


def test_questions_are_answered_at_a_fixed_number_and_at_any_time() -> None:
    assert asked("worse", 2).answers == {"frozen": "yes"}
    assert asked("within", 20).answers == {"frozen": "yes"}
    assert asked("within", 2).answers == asked("better", 2).answers == {"frozen": "no"}
    assert asked("within", 9).answers == {"frozen": None}
    trial = asked("worse", 2, sequential=True)
    differences = [a - b for a, b in zip(OTHER, BASE, strict=True)]
    assert trial.answers == {"frozen": decide(differences, trial.claims["frozen"]).answer}
    fixed = str(asked("worse", 2).document().page)
    page = str(trial.document().page)  # its tests would be of a number that was fixed before
    for word in ("significant", "interval is", "Holm"):
        assert word in fixed and word not in page
    few = {name: {s: by_seed[s] for s in (1, 2)} for name, by_seed in LOSSES.items()}
    undecided = compare_losses(few, question="worse", sequential=True).document()
    assert "first judged after 5 pairs, and there are 2" in str(undecided.summary)


def test_losses_of_any_size_and_number_have_a_page() -> None:
    diverged = {
        "a": dict.fromkeys(range(6), 3.0),
        "b": {seed: 9e5 * (seed % 2) for seed in range(6)},
    }
    page = str(compare_losses(diverged, question="within").document().page)
    assert "the data allow a difference up to inf % of perplexity" in page
    many = {"a": dict.fromkeys(range(150), 3.0), "b": {s: 3 + (-1) ** s for s in range(150)}}
    page = str(compare_losses(many, question="better", sequential=True).document().page)
    assert "Not decided, and the rule ends after 100 pairs: after n = 100 pairs" in page


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TABLE.replace("name", "id"), "has no column of names (name, model, variant"),
        (TABLE.replace("loss", "score"), "has no column 'loss': choose one with --metric; it has"),
        (
            TABLE.replace(",seed", ",cell"),
            "line 2: there is no column seed, and 'trained' does not",
        ),
        (TABLE + "frozen,1,3.4\n", "line 7 and "),
        (TABLE.replace("3.377", "nan"), "line 8: loss is nan, not a finite loss"),
        (TABLE.replace("3.377", "-inf"), "line 8: loss is -inf, not a finite loss"),
        (TABLE.replace("3.377", "3;377"), "line 8: loss is '3;377', which is not a number"),
        (TABLE.replace("3.377", ""), "line 8 has no loss; add it"),
        (TABLE.replace("frozen,2", "frozen,x"), "line 8: the seed is 'x', which is not a whole"),
        (TABLE.replace("frozen,2", "frozen,9"), "'frozen' has no loss of seed 2, which 'trained'"),
        (TABLE + "frozen,6,3.4\n", "'trained' has no loss of seed 6, which 'frozen' has"),
        (TABLE.replace("frozen,2", ",2"), "line 8 has no readable 'name'"),
        (TABLE.replace("frozen,2", "fro,zen,2"), "line 8 has 4 cells, but the first line has 3"),
        (TABLE.replace("loss", "seed"), "has several columns 'seed'"),
        ("name,seed,loss\ntrained,1,3.3\n", "needs two models; here is trained"),
        ("name,seed,loss\n", "has no record"),
        ("", "is neither a CSV or JSON lines"),
        ("# A page\n\nof text\n", "is neither a CSV or JSON lines"),
        ('{"name": "a", "seed": 1, "loss": NaN}', "record 1: loss is nan, not a finite loss"),
        ('{"name": "a", "seed": 1}\n{"name": "a"', "line 2 is not a JSON object"),
        (
            '{"loss": 1, "step": 2}',
            "has no loss of held-out text: choose one with --metric; it has",
        ),
        ('{"eval_loss": 1, "step": 2}', "does not say name and seed, as 'baseline-seed_1' does"),
        ('{"log_history": 5}', "log_history is not a list"),
        ('{\n "log_history": [\n  {"eval_loss": 1.', "it is cut short or damaged; copy it again"),
        (TABLE.replace("3.377", "1_000"), "line 8: loss is '1_000', which is not a number"),
        (TABLE.replace("3.377", "٣"), "line 8: loss is '٣', which is not a number"),
        (TABLE.replace("3.377", "-3"), "line 8: loss is -3, but no loss of text is below 0"),
        (
            '{"name": "a", "seed": 1, "loss": 3}\n{"name": "b", "seed": 1, "loss": 3, "loss": 2}',
            "line 2 has the key 'loss' twice in one object",
        ),
        (
            '[{"name": "a", "seed": 1, "loss": 3, "x": {"y": 1, "y": 2}}]',
            "losses.csv has the key 'y' twice in one object",
        ),
    ],
)
def test_bad_tables_are_refused_in_a_sentence(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        compare_losses([file(tmp_path, text)])
    assert said in str(refused.value)


@pytest.mark.parametrize("metric", ["ppl", "eval/perplexity", "val_acc", "token accuracy"])
def test_what_is_no_loss_is_not_compared_as_one(metric: str, tmp_path: Path) -> None:
    table = file(tmp_path, TABLE.replace("loss", metric))
    with pytest.raises(UserError, match=f"{metric} is not a loss by its name; give losses in nats"):
        compare_losses([table], metric=metric)


def test_a_table_with_a_name_for_each_run_is_sent_to_the_column_of_the_models(
    tmp_path: Path,
) -> None:
    """As W&B exports its table of runs."""
    rows = ["fluffy-sun-1,main,1,3.3", "calm-sea-2,mine,1,3.2", "red-owl-3,main,2,3.4"]
    rows.append("old-elm-4,mine,2,3.3")
    table = file(tmp_path, "\n".join(["Name,config.model,config.seed,eval/loss", *rows]))
    with pytest.raises(UserError, match="if these are names of runs, give --name COLUMN with"):
        compare_losses([table])
    assert list(compare_losses([table], names="config.model").losses) == ["main", "mine"]


def test_files_that_are_nothing_of_the_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
    (tmp_path / "events.out.tfevents.1").write_bytes(b"no event at all, but long enough")
    (tmp_path / "nothing").mkdir()
    for name, said in (
        ("image.png", "is not text in UTF-8, so it is neither a CSV or JSON lines"),
        ("events.out.tfevents.1", "is not an event file of TensorBoard, or is damaged ("),
        ("nothing", "is a directory with neither event files"),
        ("missing.csv", "cannot be read (No such file or directory)"),
    ):
        with pytest.raises(UserError) as refused:
            read_losses([tmp_path / name])
        assert said in str(refused.value)
    with pytest.raises(UserError, match=r"table\.csv has names of its own; give it without a:1="):
        read_losses([f"a:1={file(tmp_path, TABLE, 'table.csv')}"])
    with pytest.raises(UserError, match=r"has loss and \S+ line 2 has val_bpb; choose one"):
        other = file(tmp_path, "name,seed,val_bpb\nx,1,0.9\n", "bits.csv")
        read_losses([file(tmp_path, TABLE), other])


CURVE = [(step, "eval/loss", 9.0 - step / 200) for step in range(100, 1001, 100)]


@pytest.mark.parametrize("first", [0, None])
def test_the_last_value_is_not_of_an_attempt_that_died(first: int | None, tmp_path: Path) -> None:
    """Which went on to step 1,000, while the run was resumed from 500 and ended at 900."""
    run = tmp_path / "a-seed1"
    events(run, *CURVE, suffix=".1", session=first)
    resumed = [(step, tag, value + 0.5) for step, tag, value in CURVE if 500 < step <= 900]
    events(run, *resumed, suffix=".2", session=501)
    (loss,) = read_losses([run])
    assert (loss.value, loss.step) == (5.0, 900)


def test_attempts_that_do_not_say_which_is_the_last_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "a-seed1"
    events(run, *CURVE, suffix=".1")
    events(run, *CURVE[5:9], suffix=".2")
    with pytest.raises(UserError, match=r"ends with eval/loss at step 1000, the later .*step 900"):
        read_losses([run])
    events(run, *CURVE[5:], suffix=".3")
    (loss,) = read_losses([run])
    assert loss.step == 1000


@pytest.mark.parametrize("position", [0, 8, 12, 60, 300, -3])
def test_a_flipped_bit_in_an_event_file_is_found(position: int, tmp_path: Path) -> None:
    run = Path(events(tmp_path / "a-seed1", *CURVE))
    (path,) = run.iterdir()
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is not an event file of TensorBoard, or is damaged"):
        read_losses([run])


def test_a_cut_event_file_is_refused_unless_a_later_one_continues_it(tmp_path: Path) -> None:
    run = Path(events(tmp_path / "a-seed1", *CURVE[:6], suffix=".1"))
    (path,) = run.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="truncated record"):
        read_losses([run])
    events(run, *CURVE[5:], suffix=".2")
    (loss,) = read_losses([run])
    assert loss.step == 1000


def test_requests_that_make_no_sense_are_refused() -> None:
    for options, said in (
        ({"baseline": "other"}, "there is no model 'other' to compare with"),
        ({"question": "equal"}, "a question is one of better, worse, within, not 'equal'"),
        ({"sequential": True}, "--sequential needs a --question"),
        ({"unit": "bytes"}, "there is no unit 'bytes'"),
        ({"question": "within", "margin": 0}, "a margin of 0 %"),
    ):
        with pytest.raises(UserError, match=said):
            compare_losses(LOSSES, **options)


def test_a_seed_is_cut_out_of_a_name() -> None:
    for text in ("baseline-seed_1", "seed1 baseline", "baseline (seed=1)", "baseline/Seed-1"):
        assert split_seed(text) == ("baseline", 1)
    assert split_seed("base_seed1_lr3") == ("base_lr3", 1)
    assert split_seed("reseed1") == ("reseed1", None)


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Refused(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "megatron", "deepspeed", "transformers"):
            raise ImportError(name)

sys.meta_path.insert(0, Refused())
from pretrain.api import compare_losses
from pretrain.__main__ import main
main()
"""


@pytest.mark.distributed
def test_the_verb_needs_no_torch_and_no_checkout(tmp_path: Path) -> None:
    """Torch cannot be imported there; what is compared are event files."""
    tags = [("eval/loss", 1.0), ("train/loss", 2.0)]
    runs = [
        events(
            tmp_path / f"{name}-seed_{seed}",
            *((step, tag, loss * k) for step in (1, 2) for tag, k in tags),
        )
        for name, by_seed in LOSSES.items()
        for seed, loss in by_seed.items()
    ]
    command = [sys.executable, "-c", WITHOUT, "compare-losses"]
    options = {
        "cwd": tmp_path,
        "env": {"PYTHONPATH": str(ROOT)},
        "capture_output": True,
        "text": True,
    }
    question = ["--question", "worse", "--sequential", "--out", "page"]
    done = subprocess.run([*command, *runs, *question], **options, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "worse than trained? Yes: after n = 5 pairs" in " ".join(done.stdout.split())
    assert "written: page/report.md" in done.stdout
    page = (tmp_path / "page/report.md").read_text()
    assert "## Pair by pair" in page and "python -m pretrain compare-losses" in page
