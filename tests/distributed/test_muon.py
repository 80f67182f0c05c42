"""Muon: the same update as torch's on one rank, the same curve under every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laboratory.compare.theory import expected_cost
from laboratory.runs.finished import read_finished_run
from megatron_patches.recipe.matrices import has_matrices, stacks
from pretrain.config.load import load_config
from tests.command_line import assert_resumed_exactly
from tests.distributed import test_layouts
from tests.distributed.layouts import Chain, chains, layouts
from tests.distributed.test_layouts import Trained, with_slow
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.timeout(1800)
DESIGNS = (
    ("hybrid-three-adapters", "fp32 muon"),
    ("monarch_trainable", "fp32 muon"),
    ("unfreeze", "fp32 muon"),
    ("monarch-freezes", "fp32 muon"),
    ("modern", "fp32 muon"),
    ("vanilla", "bf16 muon"),
)
CHAINS = chains(DESIGNS, layouts(4), len(test_layouts.LINKS))
QUICK = [chain for chain in CHAINS if chain.design in ("hybrid-three-adapters", "modern")]
SLOW = [chain for chain in CHAINS if chain not in QUICK]
RESUMED = {0: ("modern", "fp32 muon"), 1: ("unfreeze", "bf16 muon")}
"""{ZeRO stage: (design, precision)} of the runs that are resumed."""
MEASURED = {"telemetry.weights_every": 2, "telemetry.spectral_norms": "['*.linear_proj.weight']"}
MUON = {"optimizer__kind": "muon", "optimizer__gradient_clip": 0.0}


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("vanilla", {}),
        ("vanilla", {"update_scale": "spectral", "nesterov": False, "newton_schulz_steps": 3}),
        ("monarch_trainable", {}),
    ],
)
def test_an_update_is_that_of_torch(
    variant: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """In bf16, in which alone torch.optim.Muon iterates; test_muon_step.py has fp32."""
    keys = {f"optimizer__muon__{key}": value for key, value in changes.items()}
    overrides = tiny_overrides(
        tmp_path,
        tmp_path,
        "muon",
        attention__variant=variant,
        deepspeed__config="zero0",
        optimizer__learning_rate=1e-4,
        optimizer__weight_decay=0.1,
        optimizer__muon__newton_schulz_dtype="bf16",
        **MUON,
        **keys,
    )
    worker = "tests.distributed.workers.muon:against_torch"
    report = run_ranks(1, worker, {"overrides": overrides})
    differences = report["differences"]
    assert len(differences) == (8 if variant == "vanilla" else 12)
    # A CPU without bf16 sums products in another order: its last digit in each of three updates.
    assert max(differences.values()) < 2e-6, differences
    assert not report["moved"]


@pytest.fixture(scope="module")
def trained(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tiny_shards, tmp_path_factory.mktemp("muon"), QUICK, SLOW)


every_chain = with_slow(QUICK, SLOW)


def test_the_chains_try_both_stages_and_every_size() -> None:
    tried = {layout for chain in CHAINS for layout in chain.layouts}
    for size in (1, 2, 4):
        assert any(layout.tensor_parallel == size for layout in tried)
        assert any(layout.data_parallel == size for layout in tried)
    assert {(layout.zero_stage, layout.ranks) for layout in tried} >= {(0, 4), (1, 4)}


@every_chain
def test_momentum_goes_on_at_another_layout(chain: Chain, trained: Trained) -> None:
    test_layouts.test_what_is_loaded_is_what_was_saved(chain, trained)


@every_chain
def test_the_audit_proves_that_matrices_were_orthogonalised(chain: Chain, trained: Trained) -> None:
    run = trained.links[chain][-1].checkpoint.parents[1]
    audit = json.loads((run / "audit.json").read_text())
    config = load_config("demo", trained.overrides(chain, chain.layouts[-1], str(chain)))
    inventory = {tensor.name: tensor for tensor in config.inventories[-1] if tensor.trains}
    taken = {name for name, tensor in inventory.items() if has_matrices(tensor)}
    assert set(audit["rules"]["muon"]) == taken
    assert set(audit["rules"]["adamw"]) == inventory.keys() - taken
    update = audit["first_update"]
    matrices = {name: stacks(inventory[name]) for name in taken}
    assert update["matrices"] == sum(stack.count for some in matrices.values() for stack in some)
    assert sum(update["matrices_by_rank"]) == update["matrices"]
    assert len(update["matrices_by_rank"]) == chain.layouts[-1].ranks
    assert update["update_norm"].keys() == taken
    for name, some in matrices.items():  # singular values near 1, as many as the smaller side
        orthonormal = sum(
            stack.count * 0.04 * max(stack.rows, stack.columns) * min(stack.rows, stack.columns)
            for stack in some
        )
        assert 0.6 < update["update_norm"][name] / orthonormal**0.5 < 1.2, name


def test_the_formulas_of_compare_are_what_the_audit_found(trained: Trained) -> None:
    unpadded = [chain for chain in QUICK if chain.layouts[-1].zero_stage == 0]
    assert unpadded
    for chain in unpadded:
        assert trained.links[chain]
        run = read_finished_run(trained.runs / str(chain))
        expected = expected_cost(run)
        assert expected is not None
        audit = json.loads((run.path / "audit.json").read_text())
        assert expected.states.optimizer_state_bytes == audit["totals"]["optimizer_state_bytes"]


@every_chain
def test_the_curve_is_that_of_one_rank(chain: Chain, trained: Trained) -> None:
    test_layouts.test_losses_are_those_of_the_uninterrupted_run(chain, trained)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(trained: Trained) -> None:
    """At TP 2 x DP 2, under both stages; the second across a change of phase."""
    after = 3
    runs = []
    for layout in layouts(4):
        if layout[:2] == (2, 2) and layout.zero_stage < 2:
            design, precision = RESUMED[layout.zero_stage]
            chain = Chain(design, precision, (layout,))
            overrides = trained.overrides(chain, layout, f"whole-{layout}")
            changes = [f"{key}={value}" for key, value in MEASURED.items()]
            changes.append(f"checkpoint.every={after}")
            runs.append({"overrides": [*overrides, *changes], "after": after})
    run_ranks(4, "tests.distributed.workers.designs:train_all", {"runs": runs})
    resumed = [*trained.runs.glob("whole-*-after-*")]
    assert len(resumed) == 2
    for run in resumed:
        whole = run.with_name(run.name.removesuffix(f"-after-{after}"))
        assert_resumed_exactly(whole, run, more_than=30)
