"""One rank tells the user that Ctrl-C was heard; a SIGHUP that nohup ignores stays ignored."""

from __future__ import annotations

import sys

import pytest

from tests.ranks import run_program

PROGRAM = """
import os, signal
from pretrain.ranks.signals import StopSignals
signals = StopSignals().install()
os.kill(os.getpid(), signal.SIGINT)
assert signals.stop
"""


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        ({}, True),
        ({"RANK": "0", "SLURM_PROCID": "3"}, True),
        ({"RANK": "1"}, False),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "1"}, False),
    ],
)
def test_one_rank_answers_ctrl_c(environment: dict[str, str], speaks: bool) -> None:
    done = run_program([sys.executable, "-c", PROGRAM], environment=environment)
    assert done.returncode == 0, done.stderr
    assert ("stopping after this step" in done.stdout) is speaks


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    program = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from pretrain.ranks.signals import StopSignals
signals = StopSignals().install()
os.kill(os.getpid(), signal.SIGHUP)
assert not signals.stop
os.kill(os.getpid(), signal.SIGXCPU)
assert signals.continue_later and not signals.stop
"""
    done = run_program([sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0, done.stderr
