"""Every JSON file that the program writes and reads back, after damage: its type or a sentence."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import demo_corpus
from data_pipeline.io.files import read_form, to_checked_json, to_json, write_json
from data_pipeline.io.lease import Holder, Lease
from data_pipeline.shards.manifest import check_shards, read_manifest, rejects_intact
from data_pipeline.shards.writing import dtype_for
from data_pipeline.sources import hub
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.tokenizer import train
from data_pipeline.tokenizer.tokenizer import check_report, identify
from data_pipeline.tokenizing import source_check
from data_pipeline.tokenizing.encode_unit import sum_counts
from data_pipeline.tokenizing.plan import TokenizeOptions, Unit, begin, read_plan
from data_pipeline.tokenizing.rejects import Limits, RejectWatch, notes
from data_pipeline.tokenizing.run import Run, finish
from data_pipeline.tokenizing.unit_files import unit_groups
from data_pipeline.tokenizing.work_unit import has_data, read_record
from laboratory.finetuning import models
from laboratory.finetuning.report import RESULT, Result
from laboratory.replay import prepare
from laboratory.study.cache import read_or_make, read_result
from laboratory.study.seal import read_seals, write_seal
from pretrain.checkpoint.format import read_about, read_index, read_marker, read_sidecar
from pretrain.checkpoint.writing import sidecar_of, write_snapshot
from pretrain.doctor.rank import write_head_node_report
from pretrain.doctor.verdict import Problem
from pretrain.errors import UserError
from pretrain.export.run_exports import is_own_export
from pretrain.job import __main__ as job
from pretrain.job.job_kinds import Training
from pretrain.job.segments import Segments, SlurmJob
from pretrain.runs import facts
from pretrain.runs.position import Position
from pretrain.training import earlier
from tests.data_pipeline.helpers import quiet
from tests.fabricated_checkpoints import ROWS, about, slice_of_full, write_two_ranks
from tests.fabricated_runs import write_run
from tests.fabricated_seals import made_seal
from tests.fuzz.damage import REFUSED, damaged_json, holding, odd_json, odd_values, right_or_refused
from tests.tiny_exports import export_facts

JOB = SlurmJob("7", 0, "n[1-2]")
FROZEN_ROWS = {"h.0.attn.c_attn.weight": [[0, 8], [16, 24]]}
EXPORT = export_facts(
    "a", "vanilla", 1, frozen_rows=FROZEN_ROWS, files={}, checkpoint_sha256="a" * 64
)
TRIAL = {
    "metrics": {"accuracy": 0.5},
    "items": 24,
    "best_epoch": 1,
    "score_aside_by_epoch": [0.5],
    "frozen_parameters": 1,
    "parameters": 10,
    "seconds": 1.5,
}
TOLD = {"document": "a", "samples": [1], "loss": 3.5, "tokens": 4, "share": 1.0, "text": "b"}
ANSWER = {
    "begins_after": 2,
    "trace": [[3, 4.0, 1.5], [4, 3.5, None]],
    "gradient_norms": {"weight": 1.5},
    "documents": [TOLD],
}
CORPUS = {
    "version": 1,
    "python": "3",
    "files": 1,
    "outputs": {"a": "b"},
    "bytes": {"a": 1},
    "documents": {"a": 1},
}
DOWNLOAD = hub.Download("c", "d", "e" * 40, (hub.RemoteFile("a/b.jsonl", 3, "f" * 64, ""),))
SEAL = made_seal(3).sealed.model_dump(exclude={"commit", "sealed", "earlier_seals"})
SEAL["settings"] = {"old": {"optimizer.learning_rate": 0.1}, "new": {}}


@dataclass(frozen=True)
class Form:
    """A file as its writer leaves it, and all that is done with what is read of it.

    Attributes:
        path: the file.
        read: reads and uses it.
        checked: it states the checksum of the rest, so that only a forger gets beyond that.
    """

    path: Path
    read: Callable[[], Any]
    checked: bool = False


def of_shards(root: Path) -> Iterator[tuple[str, Form]]:
    """Files of a tokenise run of two short texts, before its end and after it."""
    for name in "ab":
        lines = [json.dumps({"text": f"{name} word {n * n} " * 8}) + "\n" for n in range(99)]
        path = root / f"texts/{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines) + "no JSON\n")
    inputs = find_inputs([root / "texts"])
    settings = train.TrainerSettings(280, sample_bytes=20_000)
    train.train_tokenizer(inputs.files, root / "small", settings, RecordKeys())
    model = root / "small.model"
    report = root / "small.json"
    out = root / "shards"
    identity = identify(model)
    options = TokenizeOptions("two")
    run = Run(inputs, model, out, options, workers=1, report=quiet, limits=Limits(False, 1.0))
    run.make()
    finished = root / "finished"
    shutil.copytree(out, finished)
    finish(finished, 1, quiet, Limits(False, 1.0))
    (unit, *_) = read_plan(out)[1]

    def again() -> list[Unit]:
        units = read_plan(out)[1]
        begin(out, inputs=inputs, options=options, model=model, tokenizer=identity)
        return units

    yield "plan", Form(out / "plan.json", again, checked=True)
    yield "unit", Form(unit.record_path, lambda: used_record(unit), checked=True)

    def manifest() -> tuple[Any, ...]:
        read = read_manifest(finished)
        said = notes(read), *source_check.compare_with_source(read)
        check_shards(read)
        return read, *said

    yield "manifest", Form(finished / "manifest.json", manifest, checked=True)
    location = out / source_check.LOCATION_NAME
    yield "location", Form(location, lambda: source_check._location(out), checked=True)
    yield "training report", Form(report, lambda: read_form(report, train._REPORT))
    yield "report of a model", Form(report, lambda: check_report(model, identity))


def used_record(unit: Unit) -> dict[str, Any]:
    record = read_record(unit)
    RejectWatch(Limits(max_reject_rate=1.0), unit.directory).add(record)
    has_data(unit, record)
    rejects_intact(unit.rejects_path, record["rejects_sha256"])
    sum_counts([record])
    unit_groups(record, unit.data_path, dtype_for(unit.tokenizer.vocab_size))
    return record


def of_the_pipeline(root: Path) -> Iterator[tuple[str, Form]]:
    corpus = root / "corpus.json"
    lease = root / "lock"
    corpus.write_bytes(to_json(CORPUS))
    yield "corpus", Form(corpus, lambda: read_form(corpus, demo_corpus._RECORD))
    (root / hub.DOWNLOAD_NAME).write_bytes(to_json(asdict(DOWNLOAD)))
    yield "download", Form(root / hub.DOWNLOAD_NAME, lambda: hub.find_origin(root))
    lease.write_text(json.dumps(vars(Holder.this())))
    yield "lease", Form(lease, Lease(lease, "making x").holder)


def of_a_run(root: Path) -> Iterator[tuple[str, Form]]:
    run = write_run(root, "run")
    for name in ("environment", "data", "audit", "summary"):
        yield name, Form(run / f"{name}.json", partial(facts.read_facts, run / f"{name}.json"))
    for name in ("environment", "audit"):
        path = run / f"{name}.json"
        yield f"earlier {name}", Form(path, partial(facts.read_form, path, earlier._FORMS[name]))
    Segments(Training(run)).begin(JOB, 3)
    job_file = run / "slurm/segments.jsonl"
    yield "segments", Form(job_file, lambda: Segments(Training(run)).stalled(JOB, 0))
    doctor = root / "doctor.json"
    write_head_node_report(doctor, Problem("disk", "it is full", ("n1",)))
    yield "doctor", Form(doctor, lambda: facts.read_form(doctor, job._VERDICT))
    assert write_seal(root, SEAL, [])
    (seal,) = root.glob("seals/*")

    def seals() -> Any:
        read = read_seals([root])
        if read.problems:
            raise UserError(read.problems[0])
        return [str(claim) for claim in read.seals[0].sealed.hypotheses]

    yield "seal", Form(seal, seals)


def of_a_checkpoint(root: Path) -> Iterator[tuple[str, Form]]:
    path = root / "run/checkpoints/step_00000004"
    write_two_ranks(path, about(Position(4, 32, 1024), keys={"run.seed": 1}))
    yield "marker", Form(path / "COMPLETE", lambda: read_marker(path))
    yield "index", Form(path / "parameters.json", lambda: read_index(path))
    yield "about", Form(path / "checkpoint.json", lambda: read_about(path))
    briefly = path / "checkpoint.json"
    yield "position", Form(briefly, lambda: facts.read_facts(briefly)["position"]["step"])
    write_snapshot(slice_of_full(0, ROWS[0]), root, threading.Event())
    sidecar = sidecar_of(root, 0)
    yield "sidecar", Form(sidecar, lambda: read_sidecar(sidecar))


def of_results(root: Path) -> Iterator[tuple[str, Form]]:
    export = root / "export.json"
    write_json(export, EXPORT)

    def model() -> Any:
        pretrained = models.Pretrained(
            root, root, models._facts(export), "", trusted=False, name="a"
        )
        is_own_export(root)
        return models.group_models([pretrained])

    yield "export", Form(export, model)
    trial = root / "glue.json"
    read_or_make(trial, {"seed": 1}, RESULT, lambda: TRIAL)
    yield "glue", Form(trial, lambda: kept(trial)["metrics"])
    answer = root / "answer.json"
    write_json(answer, ANSWER)
    yield "answer", Form(answer, lambda: facts.read_form(answer, prepare._ANSWER))


def kept(path: Path) -> Result:
    result = read_result(path, {"seed": 1}, RESULT)
    if result is None:
        raise UserError("it is made again")
    return result


WRITERS = (of_shards, of_the_pipeline, of_a_run, of_a_checkpoint, of_results)
NAMES = """
plan, unit, manifest, location, training report, report of a model, corpus, download, lease,
environment, data, audit, summary, earlier environment, earlier audit, segments, doctor, seal,
marker, index, about, position, sidecar, export, glue, answer
"""


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Form, Any]]:
    """Return every form, and what is read of the honest file."""
    forms_by_name: dict[str, Form] = {}
    for writer in WRITERS:
        forms_by_name |= writer(tmp_path_factory.mktemp(writer.__name__))
    assert ", ".join(forms_by_name) == " ".join(NAMES.split())
    return {name: (form, form.read()) for name, form in forms_by_name.items()}


def forged(content: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Odd values under a checksum that fits them."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return odd_json(rest).map(lambda odd: to_checked_json(odd if isinstance(odd, dict) else {}))


@st.composite
def with_a_key_twice(draw: st.DrawFn, content: bytes) -> bytes:
    """State one of the keys again, before it was."""
    match = draw(st.sampled_from([*re.finditer(rb'[{,]\s*("[^"]*"):', content)]))
    odd = json.dumps(draw(odd_values)).encode()
    return content[: match.start(1)] + match[1] + b": " + odd + b", " + content[match.start(1) :]


@given(st.data())
@pytest.mark.parametrize("name", re.split(r",\s", NAMES.strip()))
def test_a_damaged_file_is_of_its_type_or_refused(
    forms: dict[str, tuple[Form, Any]], name: str, data: st.DataObject
) -> None:
    """What a checksum of its own covers is what was written, or refused, unless it is forged."""
    form, honest = forms[name]
    content = form.path.read_bytes()
    twice = data.draw(st.integers(0, 9)) == 0
    forge = form.checked and data.draw(st.booleans())
    if twice:
        changed = with_a_key_twice(content)
    elif forge:
        changed = forged(json.loads(content))
    else:
        changed = damaged_json(content)
    with holding(form.path, data.draw(changed)):
        parsed = right_or_refused(form.read)
    assert parsed is REFUSED or type(parsed) is type(honest)
    if form.checked and not forge:
        assert parsed is REFUSED or parsed == honest
    if twice:
        assert parsed is REFUSED or name in ("lease", "segments")
