"""Every verb refuses a path that is not a regular file, and a file that is far too large.

A pipe would never end, a device neither, and a file of a terabyte would take all memory.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fabricated_runs import write_run
from tests.pretrain.export.test_source_model import model
from tests.ranks import run_program, warm_cli

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

TERABYTE = 1 << 40


def _terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, TERABYTE)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terabyte": _terabyte,
}
ODD: dict[str, tuple[str, str]] = {
    "config": ("odd.yaml", "pretrain show {odd}"),
    "grid": ("odd.yaml", "pretrain sweep {odd}"),
    "deepspeed": (
        "odd.json",
        "pretrain plan demo data.global_batch_size=32 deepspeed.config={odd}",
    ),
    "weights": (
        "odd",
        "pretrain show demo attention.variant=pretrained model.initial_weights={odd}",
    ),
    "prompts": ("odd", "pretrain sample {root}/a --prompt-file {odd}"),
    "losses": ("odd.csv", "pretrain compare-losses {odd}"),
    "event file": ("odd.tfevents.1", "pretrain compare-losses a:1={odd} b:1={odd}"),
    "sentencepiece": (
        "odd.model",
        "data_pipeline tokenize {text} --tokenizer {odd} --out {out} --name x",
    ),
    "tokenizer": (
        "odd.json",
        "data_pipeline tokenize {text} --tokenizer {odd} --out {out} --name x",
    ),
    "manifest": ("shards/manifest.json", "data_pipeline verify {root}/shards"),
    "shards": ("shards/tiny-train-PydocTopics_00000.idx", "data_pipeline verify {root}/shards"),
    **{
        f"import {name}": (f"model/{name}", "pretrain import {root}/model --out {out}")
        for name in (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        )
    },
    **{
        f"sample {name}": (f"model/{name}", "pretrain sample {root}/model")
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    },
    **{
        f"compare {name}": (f"a/{name}", "pretrain compare {root}/a {root}/b --out {out}")
        for name in ("config.yaml", "environment.json", "summary.json", "metrics.jsonl")
    },
}


@pytest.fixture(scope="module")
def files(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to import, two runs, shards and a text."""
    root = tmp_path_factory.mktemp("files")
    model(root / "model")
    for name in ("a", "b"):
        write_run(root, name)
    shutil.copytree(tiny_shards, root / "shards")
    (root / "text.txt").write_text("a text\n" * 100)
    return root


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        # As a pipe it is no regular file either; one case shows that a link is followed.
        pytest.param(case, kind, marks=pytest.mark.full)
        if kind == "device" and case != "config"
        else (case, kind)
        for case, kind in itertools.product(ODD, KINDS)
    ],
)
def test_every_verb_refuses_it_and_names_it(case: str, kind: str, files: Path) -> None:
    name, command = ODD[case]
    odd = files / name
    aside = odd.with_name(f"{odd.name}.aside")
    if odd.exists():
        odd.rename(aside)
    KINDS[kind](odd)
    names = {"odd": odd, "root": files, "out": files / "out", "text": files / "text.txt"}
    package, *arguments = command.format(**names).split()
    try:
        if package == "pretrain":
            done = warm_cli(arguments, timeout=120)
        else:
            done = run_program([sys.executable, "-m", package, *arguments], timeout=120)
    finally:
        odd.unlink()
        if aside.exists():
            aside.rename(odd)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and error.startswith("error: "), done.stderr
    # What looks for a file in a directory may say that there is none.
    assert str(odd) in error or str(odd.parent) in error
    assert "Traceback" not in done.stderr and "Errno" not in error
    assert not (files / "out").exists()
