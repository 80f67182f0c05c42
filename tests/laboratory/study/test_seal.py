"""Seals: written once before the first run, and judged by what is sealed alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from laboratory.compare.compare_runs import compare_runs
from laboratory.runs.finished import FinishedRun
from laboratory.study.gaps import p_value
from laboratory.study.hypothesis import Hypothesis
from laboratory.study.seal import Seal
from laboratory.study.sequential import decide
from laboratory.study.verdict import SEQUENTIAL, fixed_rule, gap_at_end, verdicts
from laboratory.sweep.grid import read_grid
from pretrain.config.sources import dump_yaml
from pretrain.errors import UserError
from pretrain.runs.environment import git_commit
from tests.fabricated_runs import write_planned_run
from tests.fabricated_seals import Campaign, finish, made_run, made_seal, planned, runs_of, sealed
from tests.tiny import tiny_grid

pytestmark = pytest.mark.distributed  # seconds in all, for runs and seals that each test makes


def test_hits_and_misses_and_nothing_changed(tiny_shards: Path, tmp_path: Path) -> None:
    grid, runs = planned(tmp_path, tiny_shards)
    texts = [f"orthogonal {claim} vanilla" for claim in ("within 5% of", "better 1% than")]
    texts.append("orthogonal within 2% of vanilla")
    seal = sealed(grid, runs, *texts)
    assert seal is not None
    written = seal.path.stat()
    assert sealed(grid, runs, *texts) == seal and seal.path.stat() == written
    paths = finish(runs, tiny_shards, gap=0.0198)
    assert sealed(grid, runs_of(grid), *texts[:2]) is None  # a run has begun
    (sentence,) = compare_runs(paths, "vanilla").seals
    assert "orthogonal within 5 % of vanilla': HIT" in sentence
    assert "orthogonal better 1 % than vanilla': MISS" in sentence
    assert "orthogonal within 2 % of vanilla': not decided" in sentence
    unclean = str(git_commit()).endswith("+")
    changed = "changed since: a checkout had uncommitted changes."
    assert (changed if unclean else "nothing has changed since") in sentence
    assert "judged once, at equal tokens; " in sentence


def test_all_that_changed_since_is_named(tiny_shards: Path, tmp_path: Path) -> None:
    grid, runs = planned(tmp_path, tiny_shards)
    seal = sealed(grid, runs, "orthogonal worse 1% than vanilla")
    assert seal is not None
    grid, other = planned(tmp_path, tiny_shards, {"optimizer.learning_rate": 2e-3})
    paths = finish([*runs[:5], other[5], *runs[6:9]], tiny_shards, gap=0.1)
    environment = paths[0] / "environment.json"
    facts = json.loads(environment.read_text())
    early = {"started": "2001-01-01T00:00:00+0000", "git_commit": 5 * "abc" + "+"}
    segments = [facts["segments"][0] | early]
    environment.write_text(json.dumps(facts | early | {"segments": segments}))
    content = json.loads(seal.path.read_text())
    content["sealed"]["hypotheses"][0]["margin"] = 2.0
    seal.path.write_text(json.dumps(content))
    sentence, lost = compare_runs(paths, "vanilla").seals
    assert "seals lacks 1 seal named by runs or by later seals, gone or changed" in lost
    for change in (
        f"{seal.path} no longer has its own hash",
        "has changed or is gone; ",
        "1 of the sealed runs are not among these",
        f"optimizer.learning_rate is 0.002 in {other[5].name}, sealed 0.003",
        f"{runs[0].name} began before",
        f"commit abcabcabcabc, sealed at {git_commit()!s:.12}; a checkout had uncommitted",
        "worse 2 % than vanilla': not judged, 1 of its 5 pairs of runs are not among these",
    ):
        assert change in sentence, (change, sentence)


@pytest.mark.parametrize(
    ("entries", "measure", "complaint"),
    [
        ({"schedule.steps": 9}, {}, "compares runs of 2,048 and 2,304 tokens; name runs of one"),
        ({"schedule.steps": 9}, {"subjects": ["tokens"]}, "or add --match flops"),
        ({}, {"subjects": ["luck"]}, "--subject luck is nothing that runs are compared by"),
        ({}, {"subjects": ["attention.variant"]}, "outside of attention, tokens, or data"),
        ({"run.seed": 2}, {}, "one has none of seed 2; give all variants the same `seeds`"),
    ],
)
def test_what_pairs_cannot_decide_is_not_sealed(
    entries: dict[str, Any],
    measure: dict[str, Any],
    complaint: str,
    tiny_shards: Path,
    tmp_path: Path,
) -> None:
    plain = {"schedule.steps": 8, "run.seed": 1}
    other = {"name": "other", "optimizer.learning_rate": 1e-4, **plain, **entries}
    grid = read_grid(tiny_grid(tiny_shards, tmp_path, list=[{"name": "one", **plain}, other]))
    runs = runs_of(grid)
    with pytest.raises(UserError, match="'third', which is none of one, other"):
        sealed(grid, runs, "third worse 1% than one")
    with pytest.raises(UserError, match=complaint):
        sealed(grid, runs, "other worse 1% than one", rule=fixed_rule(1), **measure)
    assert not (tmp_path / "runs/seals").exists()


# What is judged, and by what


def test_further_runs_are_named_and_change_nothing(tiny_shards: Path, tmp_path: Path) -> None:
    grid, runs = planned(tmp_path, tiny_shards)
    assert sealed(grid, runs, "orthogonal better 1% than vanilla") is not None
    paths = finish(runs, tiny_shards, gap=0.03)
    first_seals = compare_runs(paths, "vanilla").seals
    assert "': MISS." in first_seals[0]
    more = finish(planned(tmp_path, tiny_shards, seeds=[6, 7, 8])[1], tiny_shards, gap=-0.5)
    other = tmp_path / "elsewhere"
    other.mkdir()
    more += finish(planned(other, tiny_shards, seeds=[9, 10, 11])[1], tiny_shards, gap=-0.5)
    comparison = compare_runs([*paths, *more], "vanilla")
    assert comparison.variant("orthogonal").gap.n == 11  # type: ignore[union-attr]
    said = comparison.seals[0].replace("a checkout had uncommitted changes", "nothing")
    assert "': MISS." in said and "left out of its verdict: " in said
    assert all(path.name in said for path in more)
    few = compare_runs([*paths[:8], *more], "vanilla").seals[0]
    assert "': not judged, 1 of its 5 pairs of runs" in few


def test_compare_judges_a_trial_by_its_own_rule_alone(tiny_shards: Path, tmp_path: Path) -> None:
    """The ordinary interval of these five pairs excludes 0, the sequential bound does not."""
    grid, runs = planned(tmp_path, tiny_shards)
    claim = "orthogonal worse 2% than vanilla"
    assert sealed(grid, runs, claim, seeds=range(1, 101), rule=SEQUENTIAL)
    gaps = (0.0003, 0.0197, 0.0051, 0.0149, 0.01)
    paths = []
    for run in runs:
        worse = run.config.attention.variant != "vanilla"
        loss = 4.0 + worse * gaps[run.config.run.seed - 1]
        paths.append(write_planned_run(run, tiny_shards, loss))
    comparison = compare_runs(paths, "vanilla")
    gap = comparison.variant("orthogonal").gap
    assert gap is not None and gap.low is not None and gap.low > 0
    assert "vanilla': undecided after 5 pairs in the order of their seeds." in comparison.seals[0]


def fabricated(differences: Sequence[float], trial: bool = False) -> Campaign:
    """A sealed campaign whose pairs have these differences."""
    seal = made_seal(len(differences), trial=trial)
    old = [4.0 + 0.1 * index for index in range(len(differences))]
    new = [loss + difference for loss, difference in zip(old, differences, strict=True)]
    return Campaign(seal, {"old": old, "new": new})


def with_(seal: Seal, **values: Any) -> Seal:
    """The seal with other values in what it states."""
    return replace(seal, sealed=seal.sealed.model_copy(update=values))


CLEAR = (0.1, 0.11, 0.12, 0.105, 0.115)


def said(campaign: Campaign, match: str = "tokens", subjects: Sequence[str] = ()) -> str:
    runs = campaign.runs(range(1, 1 + len(campaign.losses["old"])))
    return verdicts(campaign.seal, runs, gap_at_end, asked=(match, subjects))


def test_another_measure_than_the_sealed_one_is_called_unsealed() -> None:
    campaign = fabricated(CLEAR)
    assert "': HIT." in said(campaign) and "at equal tokens; " in said(campaign)
    unsealed = "Hypothesis 'new worse 2 % than old', unsealed because of what has changed: HIT."
    for match, subjects, told in (
        ("flops", [], "the report compares at equal flops, sealed is at equal tokens"),
        ("seconds", [], "the report compares at equal seconds, sealed is at equal tokens"),
        ("flops", ["tokens"], "at equal flops with --subject tokens, sealed is at equal tokens"),
    ):
        sentence = said(campaign, match, subjects)
        assert unsealed in sentence and told in sentence and "nothing has" not in sentence
    measure = campaign.seal.sealed.measure
    assert measure
    at_flops = measure.model_copy(update={"match": "flops", "subjects": ["tokens"]})
    campaign = replace(campaign, seal=with_(campaign.seal, measure=at_flops))
    assert "': HIT." in said(campaign, "flops", ["tokens"])
    assert unsealed in said(campaign, "flops") and unsealed in said(campaign, "flops", ["luck"])


def test_all_runs_of_a_learning_curve_count_for_each_of_its_gaps() -> None:
    """At equal FLOPs of several lengths, runs outside of a pair move its gap."""
    seal = made_seal(5, variants=("new", "short"))
    curves = {"match": "flops", "subjects": ["tokens"]}
    seal = with_(seal, measure=seal.sealed.measure.model_copy(update=curves))
    losses = {"old": [4.0] * 5, "new": [4.0 + gap for gap in CLEAR], "short": [5.0] * 5}
    campaign = Campaign(seal, losses)
    runs = campaign.runs(range(1, 6), ("new", "short"))

    def judged(runs: Sequence[FinishedRun]) -> str:
        return verdicts(seal, runs, gap_at_end, asked=("flops", ["tokens"]))

    assert "'new worse 2 % than old': HIT." in judged(runs)
    assert "old': not judged, 1 of the 15 sealed runs, whose losses make the" in judged(runs[:-1])
    other = replace(runs[-1], data_fingerprint="other")
    assert "'new worse 2 % than old', unsealed because of" in judged([*runs[:-1], other])


def test_a_seal_about_runs_that_are_left_out_is_named(tiny_shards: Path, tmp_path: Path) -> None:
    grid, runs = planned(tmp_path, tiny_shards)
    seal = sealed(grid, runs, "orthogonal better 1% than vanilla")
    assert seal is not None
    paths = finish(runs, tiny_shards, gap=0.03)
    alone = [path for path in paths if path.name.startswith("orthogonal")]
    (sentence,) = compare_runs(alone, "orthogonal").seals
    about = f"Not judged: the seal {seal.path.stem} is of 'orthogonal better 1 % than vanilla', "
    assert sentence == about + "whose runs are not all here."


def test_at_equal_tokens_the_subject_of_a_report_changes_no_verdict() -> None:
    """The gap is of the last losses of the sealed runs, whatever else the report compares."""
    campaign = fabricated(CLEAR)
    for subjects in (["tokens"], ["tokens", "model.num_query_groups"]):
        assert said(campaign, "tokens", subjects) == said(campaign)


def test_a_seal_at_equal_flops_is_judged_by_the_losses_there(
    tiny_shards: Path, tmp_path: Path
) -> None:
    planned(tmp_path, tiny_shards)
    path = tmp_path / "grid.yaml"
    path.write_text(path.read_text().replace("schedule.steps: 6", "schedule.flops: 1000000000"))
    grid = read_grid(str(path))
    runs = runs_of(grid)
    assert sealed(grid, runs, "orthogonal worse 1% than vanilla", match="flops")
    paths = finish(runs, tiny_shards, gap=0.03)
    (sentence,) = compare_runs(paths, "vanilla", match="flops").seals
    assert ", at equal flops; " in sentence and "vanilla': HIT." in sentence
    (sentence,) = compare_runs(paths, "vanilla").seals
    assert "the report compares at equal tokens, sealed is at equal flops" in sentence
    assert "vanilla', unsealed because of what has changed: HIT." in sentence


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"data": ["other"]}, "old-seed_1 has other data"),
        ({"sealed": "2100-01-01T00:00:00+0000"}, "new-seed_1 began before"),
        ({"other_seeds": {"new": {"attention.seed": 7}}}, "attention.seed is 1 in new-seed_1"),
        ({"settings": {"old": {}, "new": {}}}, "attention.variant is old in old-seed_1"),
        (
            {"settings": dict.fromkeys(("old", "new"), dict.fromkeys("abcd", "v" * 99))},
            f"b is none in old-seed_4, sealed {'v' * 80}; and 19 more",
        ),
    ],
)
def test_what_is_not_as_sealed_unseals_the_verdict(values: dict[str, Any], told: str) -> None:
    campaign = fabricated(CLEAR)
    sentence = said(replace(campaign, seal=with_(campaign.seal, **values)))
    assert told in sentence and "unsealed because of what has changed: HIT." in sentence


EARLIER = "2001-01-01T00:00:00+0000"
LATER = "2099-01-01T00:00:00+0000"
FASTER = {"attention.variant": {"was": "fast", "is": "new"}}


@pytest.mark.parametrize(
    ("segments", "told"),
    [
        (
            [{"first_step": 1, "changes": {}}, {"first_step": 6, "changes": FASTER}],
            "attention.variant was fast in new-seed_3 up to step 5",
        ),
        (
            [
                {"first_step": 1, "changes": {}},
                {"first_step": 6, "changes": {}, "data_changes": ["data.seed is 1, was 7"]},
            ],
            "data.seed is 1, was 7 in new-seed_3 from step 6 on",
        ),
        (
            [
                {"first_step": 1, "changes": {}, "git_commit": "d"},
                {"first_step": 6, "changes": {}, "data_changes": ["undone"]},
                {"first_step": 4, "changes": {}},
            ],
            "runs are of commit d, sealed at c",
        ),
        (
            [{"first_step": 6, "changes": FASTER, "branched_from": {"started": LATER}}],
            "Hypothesis 'new worse 2 % than old': HIT",
        ),
        (
            [{"first_step": 6, "changes": {}, "branched_from": {"started": EARLIER}}],
            "the trunk that new-seed_3 branched from began before",
        ),
    ],
)
def test_what_a_run_was_before_a_resume_or_a_branch_counts(
    segments: list[dict[str, Any]], told: str
) -> None:
    campaign = fabricated(CLEAR)
    environment = {
        "git_commit": "c",
        "segments": [{"started": LATER} | segment for segment in segments],
    }
    runs = [
        replace(run, environment=environment) if run.name == "new-seed_3" else run
        for run in campaign.runs(range(1, 6))
    ]
    sentence = verdicts(campaign.seal, runs, gap_at_end, asked=("tokens", []))
    assert told in sentence
    assert ("old', unsealed because" in sentence) == ("HIT" not in told and "commit" not in told)


def test_a_branch_of_an_earlier_trunk_is_not_sealed(tiny_shards: Path, tmp_path: Path) -> None:
    grid, _ = planned(tmp_path, tiny_shards)
    trunk = tmp_path / "trunk"
    content = yaml.safe_load(grid.path.read_text())
    content["set"] |= {"schedule.kind": "wsd", "schedule.branch_from": str(trunk)}
    grid.path.write_text(dump_yaml(content))
    branches = runs_of(read_grid(str(grid.path)))
    trunk.mkdir()
    assert sealed(grid, branches, "orthogonal worse 1% than vanilla") is None
    trunk.rmdir()
    assert sealed(grid, branches, "orthogonal worse 1% than vanilla") is not None


def test_a_seal_is_found_again_by_another_spelling_of_its_grid(
    tiny_shards: Path, tmp_path: Path
) -> None:
    claim = "orthogonal worse 1% than vanilla"
    grid, runs = planned(tmp_path, tiny_shards)
    seal = sealed(grid, runs, claim)
    finish(runs[:1], tiny_shards, gap=0.0)
    grid.path.write_text(grid.path.read_text() + "# a comment\n")
    begun = runs_of(grid)
    assert sealed(grid, begun, claim) == seal
    assert sealed(grid, begun, "orthogonal better 1% than vanilla") is None


def test_a_seal_without_its_hash_is_none_and_a_rule_of_another_version_judges_nothing() -> None:
    campaign = fabricated(CLEAR)
    sentence = said(replace(campaign, seal=replace(campaign.seal, intact=False)))
    assert "no longer has its own hash" in sentence and ", unsealed because" in sentence
    same = with_(campaign.seal, sealed="2099-01-01T00:00:00+0000")  # as the runs began
    assert "began before" not in said(replace(campaign, seal=same))
    measure = campaign.seal.sealed.measure
    assert measure is not None
    rule = measure.model_copy(update={"rule": {**measure.rule, "level": 0.2}})
    sentence = said(replace(campaign, seal=with_(campaign.seal, measure=rule)))
    assert "': not judged, this version does not know the sealed rule." in sentence


def test_a_hit_is_a_difference_of_more_than_the_margin() -> None:
    """Of 1.5 %, give or take: more than 1 %, less than 2 %, and not shown to be either of 1.5."""
    campaign = fabricated((0.0145, 0.0155, 0.015, 0.0147, 0.0153))
    margins = ((0.0, "HIT"), (1.0, "HIT"), (1.5, "not decided by these runs"), (2.0, "MISS"))
    for margin, word in margins:
        claims = [Hypothesis("new", "worse", margin, "old")]
        sentence = said(replace(campaign, seal=with_(campaign.seal, hypotheses=claims)))
        assert f"Hypothesis '{claims[0]}': {word}." in sentence, margin


def test_strangers_have_the_name_or_the_settings_of_a_sealed_design() -> None:
    def other(name: str, seed: int, variant: str) -> FinishedRun:
        run = made_run(name, seed, 4.0)
        return replace(run, config={**run.config, "attention": {"variant": variant}})

    campaign = fabricated(CLEAR)
    runs = [other("new", 7, "third"), other("third", 8, "new"), other("third", 9, "third")]
    strangers = campaign.seal.strangers([*campaign.runs(range(1, 6)), *runs], ("old", "new"))
    assert [run.seed for run in strangers] == [7, 8]


@pytest.mark.parametrize("lacking", [0, 3])
def test_a_trial_ends_at_its_first_answer_or_at_the_first_pair_that_is_not_there(
    lacking: int,
) -> None:
    random = np.random.default_rng(5)
    for mean in (0.0, 0.005, 0.03):
        differences = (mean + 0.01 * random.standard_normal(12)).tolist()
        campaign = fabricated(differences, trial=True)
        pairs = [seed for seed in range(1, 13) if seed != lacking]
        counted = differences[: lacking - 1] if lacking else differences
        decision = decide(counted, campaign.seal.sealed.hypotheses[0])
        word = {"yes": "HIT", "no": "MISS", None: "undecided"}[decision.answer]
        sentence = verdicts(campaign.seal, campaign.runs(pairs), gap_at_end)
        assert f"': {word} after {decision.n} pairs" in sentence


def test_the_correction_is_over_the_hypotheses_of_the_seal_whatever_is_compared() -> None:
    """Four designs, each of p about 0.03: none is a HIT, alone or together."""
    designs = ("a", "b", "c", "d")
    seal = made_seal(5, designs)
    claims = seal.sealed.hypotheses
    old = [4.0] * 5
    edge = claims[0].edges[1]
    new = [4.0 + edge + gap for gap in (0.001, 0.012, 0.004, 0.02, 0.013)]
    campaign = Campaign(seal, {"old": old, **dict.fromkeys(designs, new)})
    alone = with_(seal, hypotheses=claims[:1])
    asked = ("tokens", [])
    first = campaign.runs(range(1, 6), designs[:1])
    every = campaign.runs(range(1, 6), designs)
    assert "': HIT" in verdicts(alone, first, gap_at_end, asked)
    assert "': HIT" not in verdicts(seal, first, gap_at_end, asked)
    assert "': HIT" not in verdicts(seal, every, gap_at_end, asked)
    # Nor one by one.
    others = [
        with_(replace(seal, path=seal.path.with_name(name)), hypotheses=[claim])
        for name, claim in zip(designs[1:], claims[1:], strict=True)
    ]
    for together, word in (((), "': HIT"), (others, "': not decided")):
        sentence = verdicts(alone, first, gap_at_end, asked, together=(alone, *together))
        assert word in sentence


def test_p_values_are_the_t_tests_own_and_turn_with_the_interval() -> None:
    new_runs = {seed: made_run("new", seed, 4.0 + gap) for seed, gap in enumerate(CLEAR)}
    base = {seed: made_run("old", seed, 4.0) for seed in new_runs}
    gap = gap_at_end(new_runs, base)
    assert gap is not None and gap.t_p is not None and gap.high is not None
    assert p_value(Hypothesis("new", "worse", 0.0, "old"), gap) == pytest.approx(gap.t_p)
    assert p_value(Hypothesis("new", "better", 1.0, "old"), gap) == 1.0
    # The margin is what is tested: the p value is that of the differences beyond it.
    beyond = {seed: made_run("old", seed, 4.0 + np.log(1.01)) for seed in new_runs}
    shifted = gap_at_end(new_runs, beyond)
    assert shifted is not None
    assert p_value(Hypothesis("new", "worse", 1.0, "old"), gap) == pytest.approx(shifted.t_p)
    edge = 100 * (np.exp(gap.high) - 1)
    within = Hypothesis("new", "within", float(edge), "old")
    assert p_value(within, gap) == pytest.approx(0.05)
