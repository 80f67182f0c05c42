"""A seal that is taken away, and settings that no other list of keys names, are missed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from laboratory.compare.compare_runs import compare_runs
from laboratory.study.seal import Seal
from pretrain.runs.seals import content_digest
from tests.fabricated_runs import edit_json
from tests.fabricated_seals import finish, planned, sealed

pytestmark = pytest.mark.distributed  # seconds in all, for runs and seals that each test makes

CLAIM = "orthogonal worse 1% than vanilla"
LOSERS = ("orthogonal better 3% than vanilla", "orthogonal within 9% of vanilla")
HIT = "Hypothesis 'orthogonal worse 1 % than vanilla': HIT."
UNSEALED = (
    "Hypothesis 'orthogonal worse 1 % than vanilla', unsealed because of what has changed: HIT."
)


def sealed_runs(
    directory: Path,
    shards: Path,
    claims: Sequence[str] = (CLAIM, *LOSERS),
    common: Mapping[str, Any] | None = None,
) -> tuple[list[Seal], list[Path]]:
    """Seal claims one by one, then leave finished runs of which orthogonal's are 0.1 nats worse."""
    grid, runs = planned(directory, shards, common)
    seals = [sealed(grid, runs, claim) for claim in claims]
    return [seal for seal in seals if seal is not None], finish(runs, shards, gap=0.1)


def said(paths: Sequence[Path], **options: Any) -> str:
    """Return what `compare` says of the seals; the checkout's own changes are none of theirs."""
    sentences = " ".join(compare_runs(paths, "vanilla", **options).seals)
    return sentences.replace("a checkout had uncommitted changes", "")


def renamed(path: Path) -> None:
    path.rename(path.with_name("later.json"))


def moved(path: Path) -> None:
    (path.parent / "old").mkdir(exist_ok=True)
    path.rename(path.parent / "old" / path.name)


def other_suffix(path: Path) -> None:
    path.rename(path.with_suffix(".json.bak"))


def edited(path: Path) -> None:
    edit_json(path, lambda file: file["sealed"]["hypotheses"][0].update(margin=1.0))


def signed_anew(path: Path) -> None:
    content = json.loads(path.read_text())["sealed"]
    content["hypotheses"][0]["margin"] = 1.0
    path.write_text(json.dumps({"sealed": content, "sha256": content_digest(content)}))


def replaced_by_the_winner(path: Path) -> None:
    winner = next(other for other in path.parent.iterdir() if '"margin": 1.0' in other.read_text())
    shutil.copy(winner, path)


@pytest.mark.parametrize(
    "take_away",
    [
        Path.unlink,
        renamed,
        moved,
        other_suffix,
        edited,
        signed_anew,
        replaced_by_the_winner,
        lambda path: path.write_text(""),
    ],
)
def test_a_seal_that_runs_name_and_that_is_gone_unseals_the_others(
    take_away: Callable[[Path], Any], tiny_shards: Path, tmp_path: Path
) -> None:
    seals, paths = sealed_runs(tmp_path, tiny_shards)
    assert HIT in said(paths) and "gone or changed" not in said(paths)
    for loser in seals[1:]:
        take_away(loser.path)
    sentence = said(paths)
    lost = sorted(content_digest(loser.raw)[:12] for loser in seals[1:])
    assert UNSEALED in sentence and HIT not in sentence
    assert f"2 seals named by runs or by later seals, gone or changed ({', '.join(lost)})" in (
        sentence
    )


def test_without_any_seal_left_the_lost_ones_are_named(tiny_shards: Path, tmp_path: Path) -> None:
    _, paths = sealed_runs(tmp_path, tiny_shards)
    shutil.rmtree(tmp_path / "runs/seals")
    sentence = said(paths)
    assert "Not sealed: " in sentence and "seals lacks 3 seals named by runs" in sentence


def test_runs_that_are_copied_without_a_seal_name_it(tiny_shards: Path, tmp_path: Path) -> None:
    seals, paths = sealed_runs(tmp_path, tiny_shards)
    shutil.copytree(tmp_path / "runs", tmp_path / "whole")
    whole = [tmp_path / "whole" / path.name for path in paths]
    assert HIT in said(whole)
    shutil.copytree(tmp_path / "runs", tmp_path / "part")
    for loser in seals[1:]:
        (tmp_path / "part/seals" / loser.path.name).unlink()
    part = [tmp_path / "part" / path.name for path in paths]
    assert UNSEALED in said(part)


def test_a_later_seal_names_the_earlier_ones_without_any_run(
    tiny_shards: Path, tmp_path: Path
) -> None:
    """Of runs of an older version, which name no seals."""
    seals, paths = sealed_runs(tmp_path, tiny_shards, claims=(*LOSERS, CLAIM))
    for path in paths:
        edit_json(path / "environment.json", lambda facts: facts["segments"][0].pop("seals"))
    sentence = said(paths)
    assert (
        HIT in sentence
        and (
            "Not recorded: 10 of 10 runs were started by a version that did not record the seals "
            "beside them."
        )
        in sentence
    )
    seals[0].path.unlink()
    assert UNSEALED in said(paths)


def test_runs_that_are_not_compared_name_seals_too(tiny_shards: Path, tmp_path: Path) -> None:
    _, paths = sealed_runs(tmp_path, tiny_shards, claims=[CLAIM])
    other = tmp_path / "runs/other"
    shutil.copytree(paths[0], other)
    edit_json(
        other / "environment.json", lambda facts: facts["segments"][0].update(seals=["f" * 64])
    )
    assert UNSEALED in said(paths) and "(ffffffffffff)" in said(paths)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_start_without_the_seal_beside_it_unseals_the_run(
    resumed: bool, tiny_shards: Path, tmp_path: Path
) -> None:
    """Whatever time the seal states: it was written later, or taken away for a while."""
    _, paths = sealed_runs(tmp_path, tiny_shards, claims=[CLAIM])

    def start_alone(facts: dict[str, Any]) -> None:
        first = facts["segments"][0]
        later = [{**first, "first_step": 4}] if resumed else []
        facts["segments"] = [first, *later]
        facts["segments"][-1]["seals"] = []

    edit_json(paths[3] / "environment.json", start_alone)
    sentence = said(paths)
    assert UNSEALED in sentence
    assert f"{paths[3].name} started without this seal beside it" in sentence


CHANGED = {
    "stability.spike_factor": 5.0,
    "stability.max_skipped": 9,
    "deepspeed.config": "zero2",
    "deepspeed.overrides": {"gradient_predivide_factor": 2.0},
    "performance.reduced_precision_reduction": True,
    "performance.cross_entropy": "chunked",
    "run.deterministic": True,
}
RECORDED = {
    "telemetry.sample_prompts": ["Once"],
    "telemetry.every": 2,
    "data.validate_every": 3,
    "checkpoint.every": 3,
    "performance.recompute": "full",
}


@pytest.mark.slow
def test_what_takes_effect_at_a_step_is_sealed_and_what_only_records_is_not(
    tiny_shards: Path, tmp_path: Path
) -> None:
    _, paths = sealed_runs(tmp_path, tiny_shards, claims=[CLAIM])
    honest = {path: (path / "config.yaml").read_text() for path in paths}

    def said_with(changes: Mapping[str, Any], changed: Sequence[Path]) -> str:
        for path, text in honest.items():
            config = yaml.safe_load(text)
            for key, value in changes.items() if path in changed else ():
                section, _, name = key.partition(".")
                config[section][name] = value
            (path / "config.yaml").write_text(yaml.safe_dump(config))
        return said(paths)

    worse = [path for path in paths if "orthogonal" in path.name]
    for changed in (worse, paths):
        sentence = said_with(RECORDED, changed)
        assert HIT in sentence and not any(f"{key} is " in sentence for key in RECORDED)
        for key, value in CHANGED.items():
            sentence = said_with({key: value}, changed)
            assert f"{key} is " in sentence and UNSEALED in sentence, key


def test_settings_of_deepspeed_that_only_log_are_not_sealed(
    tiny_shards: Path, tmp_path: Path
) -> None:
    overrides = {"steps_per_print": 7, "gradient_predivide_factor": 2.0}
    common = {"deepspeed.overrides": overrides}
    _, paths = sealed_runs(tmp_path, tiny_shards, claims=[CLAIM], common=common)
    config = paths[0] / "config.yaml"
    config.write_text(config.read_text().replace("steps_per_print: 7", "steps_per_print: 8"))
    assert "steps_per_print: 8" in config.read_text() and HIT in said(paths)


def test_the_content_of_the_deepspeed_file_is_sealed(tiny_shards: Path, tmp_path: Path) -> None:
    settings = tmp_path / "mine.json"
    settings.write_text('{"zero_optimization": {"stage": 1}}')
    common = {"deepspeed.config": str(settings)}
    (seal,), paths = sealed_runs(tmp_path, tiny_shards, claims=[CLAIM], common=common)
    (digest,) = {contents["deepspeed.config"] for contents in seal.sealed.contents.values()}
    for path in paths:
        edit_json(
            path / "environment.json", lambda facts: facts.update(deepspeed_config_sha256=digest)
        )
    assert HIT in said(paths)
    edit_json(
        paths[0] / "environment.json", lambda facts: facts.update(deepspeed_config_sha256="0" * 64)
    )
    assert UNSEALED in said(paths)
    assert f"the content of deepspeed.config is {'0' * 64} in {paths[0].name}" in said(paths)


def test_a_seal_of_an_older_version_is_of_the_defaults_and_says_so(
    tiny_shards: Path, tmp_path: Path
) -> None:
    grid, runs = planned(tmp_path, tiny_shards)
    seal = sealed(grid, runs, CLAIM)
    assert seal is not None
    content = json.loads(seal.path.read_text())["sealed"]
    del content["earlier_seals"], content["contents"]
    unknown = ("deepspeed.config", "deepspeed.overrides", "model.mlp", "run.device")
    for settings in content["settings"].values():
        for key in (*unknown, "stability.spike_factor"):
            del settings[key]
    digest = content_digest(content)
    seal.path.unlink()
    older = seal.path.with_name(f"{digest[:12]}.json")
    older.write_text(json.dumps({"sealed": content, "sha256": digest}))
    again = sealed(grid, runs, CLAIM)
    assert again is not None and again.path == older
    paths = finish(runs, tiny_shards, gap=0.1)
    for path in paths:
        edit_json(path / "environment.json", lambda facts: facts["segments"][0].pop("seals"))
    sentence = said(paths)
    assert HIT in sentence
    assert (
        "the seal is of a version that did not name the seals before it; not in the seal, and "
        f"counted at their defaults: {', '.join(unknown)}, stability.spike_factor."
    ) in sentence
    config = paths[0] / "config.yaml"
    config.write_text(config.read_text().replace("mlp: gelu", "mlp: relu2"))
    assert "model.mlp is relu2 in" in said(paths, subjects=["model.mlp"])
