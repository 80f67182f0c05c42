"""The public interface: the examples of docs/api.md run, on real runs.

Wrong requests are refused.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain import api
from pretrain.errors import UserError
from tests.distributed.exports import QUIET
from tests.ranks import ROOT, rank_environment, run_ranks
from tests.tiny import tiny_overrides

PAGE = (ROOT / "docs/api.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_every_public_name_has_an_example() -> None:
    imported = {
        name
        for names in re.findall(
            r"^from pretrain\.api import (.*)$", "".join(EXAMPLES), flags=re.MULTILINE
        )
        for name in names.split(", ")
    }
    # FinishedRun is what load_run returns.
    assert imported | {"FinishedRun"} == {*api.__all__} and len(api.__all__) <= 12
    assert all(f"`{name}`" in PAGE and hasattr(api, name) for name in api.__all__)


def program(directory: Path) -> Path:
    """The examples in one file, so that a traceback shows the line."""
    file = directory / "examples.py"
    file.write_text("\n".join(EXAMPLES))
    return file


@pytest.mark.distributed
def test_the_examples_run(tiny_shards: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    runs = tmp_path / "demo/runs"
    variants = {name: {**QUIET, "attention__variant": name} for name in ("vanilla", "orthogonal")}
    payload = [
        tiny_overrides(tiny_shards, runs, name, **changes) for name, changes in variants.items()
    ]
    states = run_ranks(1, "tests.distributed.workers.export:train_all", {"runs": payload})
    assert states == ["finished"] * 2
    done = subprocess.run(
        [sys.executable, program(tmp_path)],
        cwd=tmp_path,
        env=rank_environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "+0.080 nats, +0.071 to +0.089, p = 1e-05"
    assert lines[1].startswith("orthogonal ") and lines[1].endswith(" 4096")
    assert lines[2].startswith("orthogonal ") and lines[3].endswith(" days")
    assert lines[4].startswith("Starcoder2ForCausalLM ") and len(lines) > 5
    assert (tmp_path / "comparison/report.md").is_file() and (
        tmp_path / "exported/config.json"
    ).is_file()
    with pytest.raises(UserError, match="exported exists already"):
        api.export(runs / "orthogonal", tmp_path / "exported")
    with pytest.raises(UserError, match=r"^dtype is 'fp16'; give fp32 or bf16$"):
        api.export(runs / "orthogonal", tmp_path / "other", dtype="fp16")


@pytest.mark.full
def test_a_typed_program_may_use_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", program(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def test_models_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(
        UserError, match="there is no model 'vanilla' to compare with; there are one, other"
    ):
        api.paired_gaps({"one": {1: 3.0}, "other": {2: 3.1}}, "vanilla")
    with pytest.raises(UserError, match="'other' and 'one' have no seed in common"):
        api.paired_gaps({"one": {1: 3.0}, "other": {2: 3.1}}, "one")


def test_losses_of_any_models_have_the_statistics_of_runs() -> None:
    base = {seed: 3 + 0.01 * seed for seed in range(1, 7)}
    other = {seed: loss + (0.1 if seed % 2 else 0.08) for seed, loss in base.items()}
    noise = {seed: loss + (-1) ** seed * 0.01 for seed, loss in base.items()}
    gaps = api.paired_gaps({"base": base, "other": other, "noise": noise}, "base")
    assert [*gaps] == ["other", "noise"]
    assert gaps["other"].mean == pytest.approx(0.09) and gaps["other"].significance_claimed
    assert gaps["noise"].mean == pytest.approx(0) and not gaps["noise"].significance_claimed
    # Holm: the smaller of two p values is doubled.
    assert gaps["other"].t_p is not None and gaps["other"].t_p_holm == pytest.approx(
        2 * gaps["other"].t_p
    )


def test_a_plan_is_the_one_of_the_verb() -> None:
    from pretrain.plan.estimate import Request, make_plan

    made = api.plan("small", ["attention.variant=monarch"], gpus=8, price=2.0)
    overrides = ("attention.variant=monarch",)
    wanted = make_plan(Request("small", overrides, 8, "a100-80gb", baseline="vanilla", price=2.0))
    assert made == wanted and made.chosen.variant == "monarch"
