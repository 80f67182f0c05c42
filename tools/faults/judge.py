"""The comparison of a disturbed run with the undisturbed one: weights, records, TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.command_line import checkpoint_tensors, deterministic_metrics, equal, logged_steps
from tools.faults.inflict import unfinished_checkpoints
from tools.faults.plan import STEPS

LOSS_ROUNDING = 1e-6
"""Largest relative difference of a loss after another layout, in fp32."""
ROUNDING = 1e-3
"""The same of other records and of weights, relative to the largest of a tensor.

AdamW divides by the root of a second moment, which makes much of the rounding of a small gradient.
"""
ALL_STEPS = list(range(1, STEPS + 1))
SCALARS = ("loss/train", "optim/grad_norm")
OF_THE_LAYOUT = ("memory/", "counters/micro_steps")
"""Records and counters that another layout has other values of."""


def differences(run: Path, reference: Path, same_layout: bool) -> list[str]:
    """Return the differences from the undisturbed run, one phrase each.

    Args:
        run: Directory of the disturbed run.
        reference: Directory of the undisturbed run.
        same_layout: Every bit must be equal, as both ran at one layout; else up to rounding.
    """
    state = run / "state"
    if not state.is_file() or state.read_text() != "finished\n":
        return ["not finished"]
    problems = []
    if (steps := logged_steps(run)) != ALL_STEPS:
        problems.append(f"metrics.jsonl has {_steps_in_words(steps)}")
    else:
        problems += _other_records(run, reference, same_layout)
    problems += _other_weights(run, reference, same_layout)
    problems += _other_events(run, reference, same_layout)
    problems += [f"{path.name} is left unfinished" for path in unfinished_checkpoints(run)]
    return problems


def _other_records(run: Path, reference: Path, same_layout: bool) -> list[str]:
    problems = []
    for ours, theirs in zip(
        deterministic_metrics(run), deterministic_metrics(reference), strict=True
    ):
        if odd := ours.keys() ^ theirs.keys():
            problems.append(f"step {ours['step']} records {sorted(odd)} or not")
        else:
            problems += [
                f"step {ours['step']}: {tag} is {ours[tag]}, not {theirs[tag]}"
                for tag in sorted(ours.keys() & theirs.keys())
                if not _near(tag, ours[tag], theirs[tag], same_layout)
            ]
    return problems[:3]


def _near(tag: str, ours: Any, theirs: Any, same_layout: bool) -> bool:
    if not same_layout and tag.startswith(OF_THE_LAYOUT):
        return True
    if not same_layout and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(
            _near(tag, ours[key], theirs[key], False) for key in ours
        )
    if same_layout or not isinstance(theirs, float) or not isinstance(ours, float):
        return equal(ours, theirs)
    return math.isclose(ours, theirs, rel_tol=LOSS_ROUNDING if tag == "loss/train" else ROUNDING)


def _other_weights(run: Path, reference: Path, same_layout: bool) -> list[str]:
    last = f"checkpoints/step_{STEPS:08d}"
    if not (run / last / "COMPLETE").is_file():
        return ["the last checkpoint is missing"]
    ours = checkpoint_tensors(run / last)
    theirs = checkpoint_tensors(reference / last)
    if ours.keys() != theirs.keys():
        return ["the last checkpoint holds other tensors"]
    different = []
    for name, tensor in ours.items():
        if same_layout or not torch.is_tensor(tensor):
            near = _near(name, tensor, theirs[name], same_layout)
        else:
            near = float((tensor - theirs[name]).abs().max()) <= ROUNDING * float(
                theirs[name].abs().max()
            )
        if not near:
            different.append(name)
    return [f"{len(different)} of {len(ours)} weights differ: {different[0]}"] if different else []


def _other_events(run: Path, reference: Path, same_layout: bool) -> list[str]:
    """Return differences of TensorBoard's events: every step once, with the undisturbed value."""
    problems = []
    ours, theirs = (
        EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        for path in (run, reference)
    )
    for tag in SCALARS:
        events = ours.Scalars(tag) if tag in ours.Tags()["scalars"] else []
        expected = theirs.Scalars(tag)
        if (steps := [event.step for event in events]) != ALL_STEPS:
            problems.append(f"TensorBoard's {tag} has {_steps_in_words(steps)}")
        elif any(
            not _near(tag, a.value, b.value, same_layout)
            for a, b in zip(events, expected, strict=True)
        ):
            problems.append(f"TensorBoard's {tag} differs")
    return problems


def _steps_in_words(steps: list[int]) -> str:
    twice = sorted({step for step in steps if steps.count(step) > 1})
    missing = sorted(set(ALL_STEPS) - set(steps))
    words = [f"steps {twice} twice"] if twice else []
    words += [f"steps {missing} missing"] if missing else []
    return " and ".join(words) or "its steps in disorder"
