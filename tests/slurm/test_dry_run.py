"""`python slurm/submit.py` without Slurm: what it would submit, and what it refuses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.config.load import load_config
from tests.command_line import assert_refused
from tests.ranks import ROOT, run_program


def submit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "slurm/submit.py", *arguments]
    return run_program(command, {"ORA_SITE": "/dev/null"} | environment, timeout=60)


def submissions(printed: str) -> dict[str, list[str]]:
    """Shell variable without its job_ -> words of the command whose job id it gets."""
    return {
        match[1]: shlex.split(match[2])
        for match in re.finditer(r"^job_([A-Za-z0-9_]+)=\$\((.*)\)$", printed, re.MULTILINE)
    }


def test_the_chain_in_its_order_each_after_the_one_before(tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    site.write_text("export SBATCH_ACCOUNT='my project'\n: ${ORA_INTERFACE:=ib0}\n")
    arguments = ("large", "--dry-run", "--tasks=8", "--sbatch=pretrain=--nodes=2-4 --comment='a b'")
    done = submit(*arguments, "model.dropout=0", ORA_SITE=str(site))
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "mkdir -p slurm/logs" in done.stdout and "export SBATCH_ACCOUNT='my project'" in done.stdout
    )
    chain = submissions(done.stdout)
    after = {
        name: re.findall(
            r"\$job_(\w+)",
            " ".join(word for word in words if word.startswith("--dependency=afterok:")),
        )
        for name, words in chain.items()
    }
    assert after == {
        "download": [],
        "tokenizer": ["download"],
        "tokenize": ["tokenizer"],
        "merge": ["tokenize"],
        "large_vanilla": ["merge"],
        "large_orthogonal": ["merge"],
        "compare": ["large_vanilla", "large_orthogonal"],
    }
    assert all(
        ("--kill-on-invalid-dep=yes" in chain[name]) == bool(names) for name, names in after.items()
    )
    assert {"--array=0-7%8", "ORA_NUM_TASKS=8", "ORA_SHARDS=data/slimpajama"} <= set(
        chain["tokenize"]
    )
    assert all("--export=ALL" in words for words in chain.values())  # whatever SBATCH_EXPORT says
    run = chain["large_orthogonal"]
    assert {"--nodes=2-4", "--comment=a b", "ORA_CONFIG=large"} <= set(run)
    assert run[run.index("slurm/pretrain_large.sh") + 1 :] == [
        "run.name=large-orthogonal",
        "attention.variant=orthogonal",
        "data.directory=data/slimpajama",
        "model.dropout=0",
    ]
    assert "ORA_RUNS=runs/large-vanilla runs/large-orthogonal" in chain["compare"]


def test_a_part_of_the_chain_does_not_wait_for_what_is_done_already() -> None:
    arguments = ("mine/tiny.yaml", "--shards", "data/tiny", "--variants", "gaussian")
    done = submit(*arguments, "--from=merge", "--until=pretrain", "--dry-run")
    chain = submissions(done.stdout)
    assert list(chain) == ["merge", "tiny_gaussian"]
    assert not [word for word in chain["merge"] if word.startswith("--dependency")]
    assert {"ORA_CONFIG=mine/tiny.yaml", "slurm/pretrain_small.sh"} <= set(chain["tiny_gaussian"])


def test_every_run_name_makes_a_variable_of_a_shell() -> None:
    arguments = ("mine/125m-größe.yaml", "--shards=data/x", "--from=pretrain", "--until=pretrain")
    chain = submissions(submit(*arguments, "--variants=vanilla", "--dry-run").stdout)
    assert list(chain) == ["125m_gr__e_vanilla"]


def test_a_modern_config_has_the_script_and_the_corpus_of_its_size() -> None:
    chain = submissions(submit("large_modern", "--dry-run").stdout)
    words = set(chain["large_modern_vanilla"])
    assert {"ORA_CONFIG=large_modern", "slurm/pretrain_large.sh"} <= words
    assert "ORA_SOURCE=slimpajama" in chain["download"]


def test_large_fetches_what_it_trains_on_unless_told_otherwise() -> None:
    script = "slurm/download.sh"
    by_default = submissions(submit("large", "--dry-run").stdout)["download"]
    assert by_default[by_default.index(script) + 1 :] == ["--fraction", "0.16667"]
    asked = ("--args=download=--fraction 0.5", "--dry-run")
    more = submissions(submit("large", *asked).stdout)["download"]
    assert more[more.index(script) + 1 :] == ["--fraction", "0.16667", "--fraction", "0.5"]
    everything = submissions(submit("large", "--source=slimpajama", "--dry-run").stdout)
    assert everything["download"][-1] == script
    assert everything["tokenize"][-1] == "slurm/tokenize.sh"


def test_the_chain_and_the_page_have_one_recipe_for_large() -> None:
    """Share of the files, what is held out, and paths: those of the configs that train on it."""
    page = (ROOT / "docs/data.md").read_text().partition("## 100 B tokens of SlimPajama\n")[2]
    joined = re.sub(r"\\\n", " ", page)
    by_hand = {
        words[3]: words[4:]
        for words in map(str.split, joined.splitlines())
        if words[:3] == ["python", "-m", "data_pipeline"]
    }
    chain = submissions(submit("large", "--dry-run").stdout)
    settings = {
        name: word.partition("=")[2]
        for words in chain.values()
        for word in words
        if (name := word.partition("=")[0]).startswith("ORA_")
    }
    text, model, shards = (settings[f"ORA_{name}"] for name in ("CORPUS", "TOKENIZER", "SHARDS"))
    options = {
        name: words[words.index(f"slurm/{name}.sh") + 1 :]
        for name, words in chain.items()
        if f"slurm/{name}.sh" in words
    }
    assert by_hand["download"] == ["slimpajama", "--out", text, *options["download"]]
    assert by_hand["train-tokenizer"] == [text, "--out", model.removesuffix(".model")]
    begin = [text, "--tokenizer", model, "--out", shards, "--name", settings["ORA_NAME"]]
    assert by_hand["tokenize"] == [*begin, *options["tokenize"], "--workers", "8"]
    assert by_hand["verify"][0] == by_hand["stats"][0] == shards
    for config in ("large", "large_modern"):
        assert load_config(config).data.directory == Path(shards)


def test_the_jobs_run_a_copy_of_the_code_unless_told_which() -> None:
    assert "export ORA_CODE=$(bash slurm/pin.sh)\n" in submit("small", "--dry-run").stdout
    assert "pin.sh" not in submit("small", "--dry-run", ORA_CODE="/mine").stdout


def test_a_reader_that_has_enough_is_no_error() -> None:
    """As `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "slurm/submit.py", "small", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("mine.yaml", "--from", "pretrain"), ("config mine.yaml is your own", "--shards")),
        (("larg",), ("neither a file nor one of the shipped configs", "did you mean large?")),
        (("mine.yaml", "--shards", "data/x"), ("no corpus of its own", "--source")),
        (
            ("base", "--from", "merge", "--until", "tokenize"),
            ("--from merge comes after --until tokenize",),
        ),
        (
            ("base", "--sbatch", "train=--nodes=2"),
            ("--sbatch train=--nodes=2 must be STEP=WORDS", "pretrain"),
        ),
        (("base", "--variants", "vanilla,vanilla"), ("each once",)),
        (
            ("base", "--sbatch", "all=--x 'unclosed"),
            ("cannot be read as words", "No closing quotation"),
        ),
        (("small", "orthogonal"), ("orthogonal is not an override of the form section.key=value",)),
        (("small", "run.name=first"), ("run.name=first", "the chain names its runs")),
        (("small", "run.directory=/scratch/x"), ("run.directory=/scratch/x", "give --runs")),
        (("small", "attention.variant=gaussian"), ("give --variants",)),
        (("small", "--args=pretrain=data.directory=data/x"), ("give --shards",)),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], fragments: tuple[str, ...]) -> None:
    assert_refused(submit(*arguments, "--dry-run"), *fragments)


def test_a_site_file_that_fails_and_a_machine_without_slurm(tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    site.write_text("no_such_command_at_all\n")
    assert_refused(
        submit("base", ORA_SITE=str(site)), f"the site file {site} failed", "no_such_command_at_all"
    )
    (tmp_path / "bash").symlink_to("/bin/bash")
    (tmp_path / "env").symlink_to("/usr/bin/env")
    assert_refused(submit("base", PATH=str(tmp_path)), "there is no sbatch here")


STOPPED = """
import signal, sys
sys.path.insert(0, "slurm")
import submit
from chain import ROOT, Job
submit.SBATCH_TIMEOUT = 2
signal.signal(signal.SIGUSR1, signal.default_int_handler)
script = ROOT / "slurm" / "compare.sh"
good = Job("good", "compare", script, {})
try:
    submit.submit([good, Job("last", "compare", script, {"LAST": "1"})], {})
except submit.SubmitError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("exec sleep 60", "sbatch did not answer within 2 s; is slurmctld up (sinfo)?"),
        ("kill -USR1 $PPID; exec sleep 60", "interrupted"),
    ],
)
@pytest.mark.parametrize(
    ("scancel", "outcome"),
    [
        ('echo "$@" >"$0.calls"', "are cancelled (77)"),
        ("exec sleep 60", "could not be cancelled: scancel 77"),
        ("kill -USR1 $PPID; exec sleep 60", "could not be cancelled: scancel 77"),
    ],
)
def test_a_chain_that_is_stopped_on_the_way_leaves_nothing_unnamed(
    tmp_path: Path, last: str, why: str, scancel: str, outcome: str
) -> None:
    """Programs in place of sbatch and scancel hang, as where slurmctld does not answer."""
    programs = {"sbatch": f'[ -z "${{LAST:-}}" ] || {{ {last}; }}\necho 77', "scancel": scancel}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = run_program(
        [sys.executable, "-c", STOPPED], environment={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    doubt = "ora-last may be queued all the same (squeue --me --name=ora-last)"
    assert done.stdout == f"{why}; the 1 jobs submitted before it {outcome}; {doubt}\n"
    if "cancelled (77)" in outcome:
        assert (tmp_path / "scancel.calls").read_text() == "77\n"


def test_a_site_file_that_hangs_is_one_sentence(tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    site.write_text("exec sleep 60\n")
    script = "import sys; sys.path.insert(0, 'slurm'); import submit; submit.SBATCH_TIMEOUT = 1; "
    done = run_program(
        [sys.executable, "-c", f"{script} sys.exit(submit.main(['base', '--dry-run']))"],
        environment={"ORA_SITE": str(site)},
    )
    assert_refused(done, f"the site file {site} did not end within 1 s")
