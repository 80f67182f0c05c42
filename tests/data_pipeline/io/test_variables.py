"""Empty variables of the environment count as unset, for every program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, rank_environment
from tests.tiny import tiny_overrides

NAMES = """
RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT
SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_JOB_ID SLURM_ARRAY_TASK_ID SLURM_RESTART_COUNT
SLURMD_NODENAME SLURM_STEP_NODELIST OMP_NUM_THREADS ORA_REFUSAL DS_ACCELERATOR DEEPSPEED_LOG_LEVEL
WANDB_PROJECT CUDA_DEVICE_MAX_CONNECTIONS TORCH_CPP_LOG_LEVEL HF_ENDPOINT HF_HOME HOME
"""
EMPTY = dict.fromkeys(NAMES.split(), "")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    environment = rank_environment() | EMPTY
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.distributed
def test_a_training_among_empty_variables(tiny_shards: Path, tmp_path: Path) -> None:
    overrides = tiny_overrides(tiny_shards, tmp_path, "run", schedule__steps=2)
    done = run("pretrain", "train", "demo", *overrides, "--local-ranks", "2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/summary.json").is_file()


@pytest.mark.distributed  # seconds
def test_the_pipeline_among_empty_variables(tiny_shards: Path) -> None:
    done = run("data_pipeline", "verify", str(tiny_shards))
    assert done.returncode == 0, done.stderr


def test_what_says_something_by_being_empty_stays() -> None:
    program = (
        "import os; from data_pipeline.io.home import unset_empty_variables as unset; "
        "unset(); print(sorted(name for name in os.environ if not os.environ[name]))"
    )
    names = {"CUDA_VISIBLE_DEVICES": "", "http_proxy": "", "MASTER_ADDR": "", "HF_ENDPOINT": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | names, cwd=ROOT, capture_output=True
    )
    assert done.stdout.decode().strip() == "['CUDA_VISIBLE_DEVICES', 'http_proxy']"
