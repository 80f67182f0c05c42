"""compare: which runs it takes for samples of what, what it refuses, and what it shows and
writes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing import io_wrapper

from laboratory.compare.compare_runs import compare_runs
from laboratory.compare.comparison import Comparison
from laboratory.compare.report import (
    compare_command,
    comparison_document,
    link_event_files,
    print_comparison,
    report_page,
    write_comparison,
)
from laboratory.compare.summary import in_short
from laboratory.study.report import page_text, write
from megatron_patches.recipe.variants import VARIANTS
from pretrain.config.attention import written_axes
from pretrain.errors import UserError
from tests.fabricated_runs import write_run
from tests.ranks import run_program

COMMAND = [("python", "-m", "pretrain", "compare"), ("runs/a b",)]
LOSSES = {"vanilla": (4.00, 4.10, 3.90, 4.05, 3.95), "orthogonal": (4.03, 4.11, 3.98, 4.05, 4.02)}


def sweep(root: Path, seeds: int = 5, **changes: Any) -> list[Path]:
    """Runs of both variants of LOSSES with seeds from 0; the arguments are those of `write_run`."""
    return [
        write_run(root, f"{variant}-{seed}", variant, seed=seed, loss=losses[seed], **changes)
        for variant, losses in LOSSES.items()
        for seed in range(seeds)
    ]


def printed(comparison: Comparison, width: int = 100) -> str:
    output = io.StringIO()
    print_comparison(comparison, Console(file=output, width=width))
    return output.getvalue()


def test_seeds_of_a_variant_are_its_samples(tmp_path: Path) -> None:
    comparison = compare_runs(sweep(tmp_path)[::-1], "vanilla")
    base, other = comparison.variants
    assert (base.name, other.name, comparison.baseline) == ("vanilla", "orthogonal", "vanilla")
    assert [run.seed for run in other.runs] == [0, 1, 2, 3, 4]
    assert base.validation_loss is not None and base.validation_loss.mean == pytest.approx(4.0)
    assert base.gap is None and other.gap is not None
    assert other.gap.differences == pytest.approx([0.03, 0.01, 0.08, 0.0, 0.07])
    assert comparison.notes == ()


def with_attention(root: Path, name: str, variant: str, **settings: Any) -> Path:
    """A run with these settings of the attention."""
    changes = {f"config.attention.{key}": value for key, value in settings.items()}
    return write_run(root, name, variant, changes=changes)


def names(paths: list[Path], baseline: str = "vanilla") -> list[str]:
    return [variant.name for variant in compare_runs(paths, baseline).variants]


def test_a_label_of_several_words_is_called_by_the_name_of_its_grid(tmp_path: Path) -> None:
    """A name takes the place of one label; labels that share a name stay."""
    paths = []
    for seed in (1, 2):
        for name, adapters in (
            ("base", []),
            ("conv4-t500", ["short_convolution", "query_key_bias"]),
            ("both-a", ["low_rank"]),
            ("both-b", ["low_rank", "channel_scale"]),
        ):
            full = f"{name}-seed_{seed}"
            changes = {"config.attention.adapters": adapters}
            paths.append(write_run(tmp_path, full, seed=seed, changes=changes))
    wanted = ["vanilla", "conv4", "vanilla+low_rank", "vanilla+low_rank+channel_scale"]
    assert names(paths) == wanted
    for baseline in ("conv4", "vanilla+short_convolution+query_key_bias"):
        assert compare_runs(paths, baseline).baseline == "conv4"


def test_labels_have_adapters_and_only_the_settings_in_which_runs_differ(tmp_path: Path) -> None:
    """Keys that are not in this version's config are labelled like any other.

    The adapters that a variant has of itself are not told.
    """
    monarch = "monarch_shared_conv"
    default_adapters = list(VARIANTS[monarch].adapters)
    more_adapters = [*default_adapters, "low_rank"]
    runs: dict[str, tuple[str, dict[str, Any]]] = {
        "vanilla": ("vanilla", {}),
        "orthogonal+low_rank": ("orthogonal", {"adapters": ["low_rank"], "low_rank": 8}),
        "orthogonal+query_key_bias+low_rank": (
            "orthogonal",
            {"adapters": ["query_key_bias", "low_rank"], "low_rank": 16},
        ),
        "orthogonal construction=svd": ("orthogonal", {"construction": "svd"}),
        "orthogonal construction=qr": ("orthogonal", {}),
        "gaussian frozen_heads={0-1: 1.0, 2-3: 0.5}": (
            "gaussian",
            {"frozen_heads": {"0-1": 1.0, "2-3": 0.5}},
        ),
        "gaussian frozen_heads={0-1: 0.25}": ("gaussian", {"frozen_heads": {"0-1": 0.25}}),
        monarch: (monarch, {"adapters": default_adapters}),
        f"{monarch}+none": (monarch, {"adapters": []}),
        "+".join((monarch, *more_adapters)): (monarch, {"adapters": more_adapters}),
    }
    paths = [
        with_attention(tmp_path, str(number), variant, **settings)
        for number, (variant, settings) in enumerate(runs.values())
    ]
    assert names(paths) == list(runs)
    assert names([paths[0], paths[2]])[1] == "orthogonal+query_key_bias+low_rank"


def test_a_combination_that_has_a_name_is_called_by_it(tmp_path: Path) -> None:
    """However it was written: `compare` takes both for one method, and refuses two of one seed."""
    values = {name: written_axes(policy) for name, policy in VARIANTS.items()}
    paths = [write_run(tmp_path, "vanilla")]
    for variant, name in (("monarch", "monarch_shared_conv"), ("orthogonal", "dct")):
        paths.append(with_attention(tmp_path, name, variant, **values[name]))
    assert names(paths) == ["vanilla", "monarch_shared_conv", "dct"]
    other = values["orthogonal_shared"] | {"adapters": values["monarch_shared_conv"]["adapters"]}
    paths.append(with_attention(tmp_path, "other", "orthogonal_shared", **other))
    assert names(paths)[3] == "orthogonal_shared+short_convolution+query_key_bias+channel_scale"
    paths.append(
        with_attention(tmp_path, "again", "monarch_shared_conv", **values["monarch_shared_conv"])
    )
    with pytest.raises(UserError, match="both 'monarch_shared_conv'"):
        compare_runs(paths, "vanilla")


def test_the_baseline_is_a_label_a_variant_or_a_run(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path, "plain"),
        write_run(tmp_path, "ora-1", "orthogonal"),
        with_attention(tmp_path, "ora-2", "orthogonal", construction="svd"),
    ]
    for baseline in ("orthogonal construction=svd", "ora-2"):
        assert names(paths, baseline)[0] == "orthogonal construction=svd"
    assert names(paths[1::-1], "orthogonal")[0] == "orthogonal"
    said = "several groups of runs; give one of these: 'vanilla', 'orthogonal "
    with pytest.raises(UserError, match=said):
        compare_runs(paths, "orthogonal")
    with pytest.raises(UserError, match="--baseline none is none of the variants and runs given"):
        compare_runs(paths, "none")


def depth_runs(root: Path, variants: dict[str, tuple[int, ...]]) -> list[Path]:
    paths = []
    for variant, depth in ((key, depth) for key, depths in variants.items() for depth in depths):
        changes = {"config.model.num_layers": depth}
        for seed in (1, 2):
            name = f"{variant}-{depth}-{seed}"
            loss = 5 - depth / 10 + seed / 100
            paths.append(write_run(root, name, variant, seed=seed, loss=loss, changes=changes))
    return paths


def test_a_subject_is_compared_within_its_values(tmp_path: Path) -> None:
    paths = depth_runs(tmp_path, {"orthogonal": (10, 2), "vanilla": (10, 2)})
    comparison = compare_runs(paths, "vanilla", ["model.num_layers"])
    assert [(variant.name, variant.baseline) for variant in comparison.variants] == [
        ("vanilla num_layers=2", "vanilla num_layers=2"),
        ("orthogonal num_layers=2", "vanilla num_layers=2"),
        ("vanilla num_layers=10", "vanilla num_layers=10"),
        ("orthogonal num_layers=10", "vanilla num_layers=10"),
    ]
    gaps = [variant.gap and variant.gap.mean for variant in comparison.variants]
    assert gaps == [None, 0, None, 0]
    report = page_text(report_page(comparison, COMMAND))
    assert "Subject: model.num_layers." in report and "### num_layers=10" in report


def test_a_subject_with_one_baseline_for_all(tmp_path: Path) -> None:
    paths = depth_runs(tmp_path, {"orthogonal": (10, 2)})
    comparison = compare_runs(paths, "orthogonal num_layers=2", ["model.num_layers"])
    gap = comparison.variant("orthogonal num_layers=10").gap
    assert gap is not None and gap.mean == pytest.approx(-0.8)
    paths += depth_runs(tmp_path, {"vanilla": (2,)})
    with pytest.raises(UserError, match="no run of the baseline vanilla with num_layers=10"):
        compare_runs(paths, "vanilla", ["model.num_layers"])


def named_runs(root: Path, **changes: Any) -> list[Path]:
    """Two names, two lengths, two seeds; `small` has fewer groups and another variant."""
    small = {"config.model.num_query_groups": 1, "config.attention.variant": "orthogonal"}
    return [
        write_run(
            root,
            f"{arm}-t{steps}-seed_{seed}",
            seed=seed,
            loss=4 + (arm == "small") / 10 + seed / 100,
            changes={"config.data.global_batch_size": steps, "summary.tokens": 2000 * steps}
            | (small | changes if arm == "small" else {}),
        )
        for arm in ("small", "large")
        for steps in (10, 20)
        for seed in (1, 2)
    ]


def test_variants_by_name_have_shapes_of_their_own(tmp_path: Path) -> None:
    paths = named_runs(tmp_path)
    with pytest.raises(UserError, match=r"model.num_query_groups is 1 in"):
        compare_runs(paths, "vanilla", ["tokens"])
    comparison = compare_runs(paths, "large", ["tokens"], by="names")
    assert [(variant.name, variant.baseline) for variant in comparison.variants] == [
        (f"{name} tokens={tokens}", f"large tokens={tokens}")
        for tokens in (20_000, 40_000)
        for name in ("large", "small")
    ]
    assert [round(variant.gap.mean, 9) for variant in comparison.variants if variant.gap] == [
        0.1,
        0.1,
    ]
    (note,) = [note for note in comparison.notes if "differ in model" in note]
    assert note == "The runs also differ in model.num_query_groups: 4 in large; 1 in small."
    gaps = [line for line in in_short(comparison) if "nats per token (95 %" in line]
    assert [line.partition(":")[0] for line in gaps] == ["small tokens=40000", SLOPE]
    command = compare_command(paths, comparison, tmp_path)
    assert command[-1] == ("--by", "names")


SLOPE = "small, tokens 20,000 to 40,000"


def test_a_name_for_runs_of_two_kinds_is_refused(tmp_path: Path) -> None:
    paths = named_runs(tmp_path)
    with pytest.raises(UserError, match=r"tokens is 20000 in .*say --subject tokens"):
        compare_runs([path for path in paths if "large" in path.name], "large", by="names")
    rate = {"config.optimizer.learning_rate": 2e-3}
    other = write_run(tmp_path, "one-seed_2", seed=2, changes=rate)
    with pytest.raises(UserError, match=r"both 'one' by their names, but differ in optimizer.lea"):
        compare_runs([write_run(tmp_path, "one-seed_1"), other], "one", by="names")
    groups = {"config.model.num_query_groups": 1}
    pair = [write_run(tmp_path, "two-seed_1"), write_run(tmp_path, "two-seed_2", changes=groups)]
    with pytest.raises(UserError, match=r"model.num_query_groups is 4 in"):
        compare_runs(pair, "two", by="names")


def test_sizes_that_follow_from_the_subject_need_not_be_named(tmp_path: Path) -> None:
    """Eight heads of 16 in place of four of 32: head_dim and num_query_groups follow."""
    shape = {"num_attention_heads": 8, "num_query_groups": 8, "head_dim": 16}
    eight = {f"config.model.{key}": value for key, value in shape.items()}
    paths = [write_run(tmp_path, "four"), write_run(tmp_path, "eight", changes=eight)]
    with pytest.raises(UserError) as refusal:
        compare_runs(paths, "vanilla")
    assert "num_attention_heads" in str(refusal.value) and "head_dim" not in str(refusal.value)
    assert len(compare_runs(paths, "four", ["model.num_attention_heads"]).variants) == 2
    corpora = {"data.fingerprint": "0" * 64, "data.validation_tokens": {"prose": 5, "topics": 2}}
    paths = [paths[0], write_run(tmp_path, "other", changes=corpora)]
    assert len(compare_runs(paths, "four", ["data.fingerprint"]).variants) == 2


def test_what_else_differs_is_told(tmp_path: Path) -> None:
    paths = sweep(tmp_path, 2)
    changes = {
        "config.optimizer.learning_rate": 3e-4,
        "environment.device": "NVIDIA H100",
        "config.data.seed": 7,
    }
    paths[3] = write_run(tmp_path / "b", "orthogonal-1", "orthogonal", seed=1, changes=changes)
    assert compare_runs(paths, "vanilla").notes == (
        "orthogonal-1 and the baseline's run of the same run.seed have different data.seed: these "
        "pairs did not see the same samples in the same order.",
        "The runs also differ in environment.device: cpu with AVX2 in vanilla, orthogonal-0; "
        "NVIDIA H100 in orthogonal-1.",
        "The runs also differ in optimizer.learning_rate: 0.001 in vanilla, orthogonal-0; 0.0003 "
        "in orthogonal-1.",
    )


def start(step: int, was: float | None = None, now: float = 0.001) -> dict[str, Any]:
    """A start of a run whose learning rate was another before, if it was."""
    rate = {} if was is None else {"optimizer.learning_rate": {"was": was, "is": now}}
    return {"first_step": step, "changes": rate}


@pytest.mark.parametrize(
    ("starts", "told"),
    [
        ([start(1), start(6, 0.03)], "0.03 in NAME up to step 5"),
        # Steps of the second start were trained again, from an earlier checkpoint.
        ([start(1), start(6, 0.03, 0.5), start(4, 0.5)], "0.03 in NAME up to step 3"),
        ([start(1), start(6, 0.03), start(4)], "0.03 in NAME up to step 3"),
        ([start(1), start(6, 0.001, 0.5), start(4, 0.5)], ""),
        ([start(1), start(6, 0.001, 0.5), start(8, 0.5)], "0.5 in NAME up to step 7"),
    ],
)
def test_what_a_resume_has_changed_is_told(
    tmp_path: Path, starts: list[dict[str, Any]], told: str
) -> None:
    paths = sweep(tmp_path, 2)
    file = paths[3] / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"segments": starts}))
    notes = compare_runs(paths, "vanilla").notes
    change_notes = [note for note in notes if "changed on the way" in note]
    assert bool(change_notes) == bool(told)
    assert told.replace("NAME", paths[3].name) in "".join(change_notes)


def test_the_report_says_which_program_trained_the_runs(tmp_path: Path) -> None:
    versions = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8"}
    newer = {"environment.git_commit": "0123456789abcdef", "environment.packages": versions}
    paths = [write_run(tmp_path, f"vanilla-{seed}", seed=seed, changes=newer) for seed in (0, 1)]
    older = {"environment.cpu_kernels": None}
    paths.append(write_run(tmp_path, "orthogonal-0", "orthogonal", seed=0, changes=older))
    lines = page_text(report_page(compare_runs(paths, "vanilla"), [["compare"]]), []).splitlines()
    assert lines[-2:] == [
        "* 2 of 3 runs: commit 0123456789ab, torch 2.13.0+cpu, deepspeed 0.19.8, cpu with AVX2 × 4",
        "* 1 of 3 runs: no commit recorded, cpu × 4",
    ]


def test_seeds_without_a_partner_and_runs_that_diverged_are_told(tmp_path: Path) -> None:
    paths = [*sweep(tmp_path, 2), write_run(tmp_path, "lost", "gaussian", seed=0, loss=None)]
    paths.append(write_run(tmp_path, "alone", "gaussian", seed=9, loss=4.0))
    comparison = compare_runs(paths, "vanilla")
    variant = comparison.variant("gaussian")
    assert variant.gap is None
    assert variant.validation_loss is not None and variant.validation_loss.n == 1
    notes = " ".join(comparison.notes)
    assert "The validation loss of lost is not finite" in notes
    assert "Only one of gaussian and vanilla has a run with seed 1, 9" in notes
    assert "no seed in common with the baseline" in printed(comparison)


@pytest.mark.parametrize("variants", [1, 2, 7])
def test_the_console_shows_every_number_whole_in_100_columns(tmp_path: Path, variants: int) -> None:
    paths = sweep(tmp_path, 2)[: 2 * min(variants, 2)]
    for number in range(variants - 2):
        long = {"adapters": ["channel_scale", "low_rank"], "low_rank": number}
        name = f"long-{number}"
        paths.append(with_attention(tmp_path, name, "orthogonal_trainable", **long))
    text = printed(compare_runs(paths, "vanilla"))
    assert max(map(len, text.splitlines())) <= 100
    expected = ["4.0500", "± 0.0707", "57.47", "1,313,024", "1,000", "9.77 KiB"]
    if variants > 1:
        expected += ["+0.020", "[-0.107, +0.147]", "(+2.0 %)", "1,181,952", "(-10.0 %)", "n < 5"]
        expected.append("not claimed")
    assert [cell for cell in expected if cell not in text] == []


@pytest.mark.distributed
def test_everything_is_written_and_again_the_same(tmp_path: Path) -> None:
    paths = sweep(tmp_path / "runs")
    for path in paths:
        (path / "tensorboard").mkdir()
        (path / "tensorboard" / "events.out.tfevents.1.host.1.0").write_bytes(b"")
    for out in ("a", "b"):
        write_comparison(compare_runs(paths, "vanilla"), tmp_path / out, COMMAND)
    link_event_files(compare_runs(paths, "vanilla"), tmp_path / "b/tensorboard")  # once more
    written = [[path for path in (tmp_path / out).iterdir() if path.is_file()] for out in "ab"]
    first, second = ({path.name: path.read_bytes() for path in paths} for paths in written)
    assert first == second
    figures = {"loss", "gap"}
    drawn = {f"{name}.{ending}" for name in figures for ending in ("png", "svg")}
    assert set(first) == {"report.md", "report.html", "comparison.json"} | drawn
    report = first["report.md"].decode()
    for part in (
        "| orthogonal | 5 | +0.0380 | [-0.0062, +0.0822] | +3.9 % | ±8.6 % | +1.07 |",
        "n = 5); the data allow a difference up to 8.6 % of perplexity.",
        "equivalence at 2.5 % by two one-sided t-tests",
        "d_z = mean(d) / sd(d)",
        "python -m pretrain compare \\\n    'runs/a b'",
        "![gap](gap.png)",
        "· by formula",
    ):
        assert part in report
    links = tmp_path / "b" / "tensorboard"
    seen = io_wrapper.GetLogdirSubdirectories(str(links))
    wanted = {f"{variant}/seed-{seed}" for variant in LOSSES for seed in range(5)}
    assert {str(Path(path).relative_to(links)) for path in seen} == wanted


def test_where_no_link_can_be_made_tensorboard_is_sent_to_the_runs(tmp_path: Path) -> None:
    """As after a copy to a file system without links, which has directories in their place."""
    paths = sweep(tmp_path / "runs")[:2]
    for path in paths:
        (path / "tensorboard").mkdir()
    comparison = compare_runs(paths, "vanilla")
    out = tmp_path / "out"
    copied = out / "tensorboard/vanilla/seed-0/kept"
    assert write_comparison(comparison, out, COMMAND) == out / "tensorboard"
    copied.parent.unlink()
    copied.mkdir(parents=True)
    assert write_comparison(comparison, out, COMMAND) == tmp_path / "runs"
    assert copied.is_dir() and (out / "report.html").is_file()


def test_json_holds_every_number_and_null_where_there_is_none(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lost = write_run(tmp_path, "lost", "gaussian", loss=None)
    comparison = compare_runs([*sweep(tmp_path), lost], "vanilla")
    write(replace(comparison_document(comparison, COMMAND), figures={}), tmp_path / "out")
    content = json.loads((tmp_path / "out" / "comparison.json").read_text(), parse_constant=refuse)
    variants = content["variants"]
    assert [variant["name"] for variant in variants] == ["vanilla", "orthogonal", "gaussian"]
    gap = comparison.variant("orthogonal").gap
    for key in ("mean", "low", "high", "t_p_holm", "wilcoxon_p", "cohens_dz", "equivalent_within"):
        assert variants[1]["gap"][key] == getattr(gap, key)
    assert (variants[2]["validation_loss"], variants[2]["gap"]) == (None, None)
    losses = [run["validation_loss"] for variant in variants for run in variant["runs"]]
    assert losses == [*LOSSES["vanilla"], *LOSSES["orthogonal"], None]


@pytest.mark.distributed
def test_the_verb_takes_the_runs_of_a_folder(tmp_path: Path) -> None:
    """Reading runs back needs no torch, which takes seconds to import."""
    code = (
        "import sys, runpy; sys.argv = ['pretrain', *sys.argv[1:]]\n"
        "try: runpy.run_module('pretrain', run_name='__main__')\n"
        "except SystemExit as end: sys.exit('torch' if 'torch' in sys.modules else end.code)"
    )

    def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "compare", *map(str, arguments)]
        return run_program(command)

    paths = sweep(tmp_path, 1)
    out = tmp_path / "out"
    (tmp_path / "sample_order").mkdir()  # lies among the runs; `runs/*` finds it
    done = compare(*paths, tmp_path / "sample_order", "--out", out)
    assert done.returncode == 0, done.stderr
    assert f"left out, because there is no run in it: {tmp_path / 'sample_order'}" in done.stdout
    assert f"report: {out / 'report.html'}" in done.stdout
    nothing = compare(tmp_path / "sample_order", tmp_path / "sample_order" / "..", "--out", out)
    assert nothing.returncode == 2 and "is not a run directory" in nothing.stderr
