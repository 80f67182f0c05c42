"""`plan` without ranks: sums that must agree, what it prints, what it refuses, what it advises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_patches.recipe.counting import forward_flops_per_token
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.errors import UserError
from pretrain.plan import report
from pretrain.plan.advice import divisors, fit_of
from pretrain.plan.cards import GPUS, find_gpu
from pretrain.plan.estimate import Plan, Request, Saving, make_plan, saving
from pretrain.plan.memory import memory_of
from pretrain.plan.report import as_json
from pretrain.plan.workload import workload_of

FREEZES = ("attention.variant=vanilla", "attention.phases=[{at: 0.25, freeze: all}]")


def planned(
    config: str,
    *overrides: str,
    gpus: int = 16,
    gpu: str = "a100-80gb",
    baseline: str = "vanilla",
    **more: float,
) -> Plan:
    return make_plan(Request(config, overrides, gpus, gpu, baseline=baseline, **more))


def test_a_step_is_compute_memory_traffic_and_communication() -> None:
    """By hand, `large` of ordinary attention: 25 × 512 tokens a GPU on 16.

    A forward pass has 2 × 334,856,192 FLOPs a token in products and half the scores' 2 × 24 × 2 ×
    512 × 1024; weight gradients run at 190, the rest at 225 TFLOP/s, attention at 135 × 512 / 862,
    3.5 times. A layer keeps 16 vectors of 1024 in bf16 and two masks of a byte; they move 4 times.
    """
    plan = planned("large", "attention.variant=vanilla")
    seconds, shape = plan.chosen.seconds, plan.config.shape
    forward = forward_flops_per_token(shape, plan.config.policy, causal_share=0)
    scores = 24 * 2 * 512 * 1024
    attention = 3.5 * scores / (135e12 * 512 / (512 + 350))
    products = forward * (2 / 225e12 + 1 / 190e12)
    assert seconds.compute == pytest.approx(25 * 512 * (products + attention))
    kept = 25 * 512 * 1024 * (24 * (16 * 2 + 2) + 5)
    assert plan.chosen.memory.activations == kept
    gradients_and_update = (10 + 22 + 2 / 16 + 28 / 16) * plan.chosen.parameters.trainable
    moved = 4 * kept + 25 * 512 * 32_000 * 6 + gradients_and_update
    assert seconds.memory == pytest.approx(moved / 1.65e12, rel=1e-3)
    gathered = 15 / 16 * 2 * plan.chosen.parameters.trainable
    assert seconds.communication == pytest.approx(gathered / 160e9)
    assert seconds.total == seconds.compute + seconds.memory + seconds.communication


def test_recomputation_takes_time_and_gives_its_activations() -> None:
    none, attention, full = (
        planned("large", f"performance.recompute={part}").chosen
        for part in ("none", "attention", "full")
    )
    assert full.memory.activations < attention.memory.activations < none.memory.activations
    assert full.memory.peak < attention.memory.peak < none.memory.peak
    seconds = [estimate.seconds.total for estimate in (none, attention, full)]
    assert seconds == sorted(set(seconds)) and seconds[2] < 4 / 3 * seconds[0]
    assert full.flops.model == none.flops.model
    alone = planned("large", "parallel.tensor_model_parallel_size=2").chosen.seconds.communication
    again = [
        planned(
            "large", "parallel.tensor_model_parallel_size=2", f"performance.recompute={part}"
        ).chosen.seconds.communication
        for part in ("attention", "full")
    ]
    # An all-reduce moves its bytes once over two ranks: twice 25 × 512 × 1024 in bf16.
    all_reduce = 2 * 25 * 512 * 1024 * 2 / GPUS["a100-80gb"].node_gb_s / 1e9
    assert again == [pytest.approx(alone + 24 * count * all_reduce) for count in (1, 2)]


def test_documents_cost_a_mask_only_where_there_is_one() -> None:
    apart = ("data.reset_at_document_end=true", "data.sequence_length=8192")
    apart += ("data.micro_batch_size=4", "attention.variant=vanilla")
    together, flash, mask = (
        planned("large_modern", *changes).chosen
        for changes in (apart[1:], apart, (*apart, "performance.document_attention=mask"))
    )
    assert flash.memory == together.memory and flash.seconds == together.seconds
    layers = planned("large_modern").config.shape.num_layers
    assert mask.memory.activations - flash.memory.activations == layers * 4 * 8192**2 * 2
    assert mask.seconds.compute > flash.seconds.compute


@pytest.mark.parametrize(
    "setting",
    ["communication_data_type=bf16", "prescale_gradients=true", "gradient_predivide_factor=2"],
)
def test_settings_that_deepspeed_reduces_by_end_the_overlap(setting: str) -> None:
    plain, changed = (
        planned("large", *changes).chosen for changes in ((), (f"deepspeed.overrides.{setting}",))
    )
    assert changed.memory.update_buffers > plain.memory.update_buffers == 0
    bytes_of_a_gradient = 2 if "bf16" in setting else 4
    # Half of it in a reduction's two directions, over the network that is each GPU's own.
    seconds = 15 / 16 * 2 * bytes_of_a_gradient * plain.parameters.trainable / 160e9
    assert changed.seconds.communication == pytest.approx(
        seconds + plain.seconds.communication, rel=1e-6
    )


def test_freezing_takes_its_weight_gradients_and_nothing_else_of_the_products() -> None:
    plan = planned("large")
    assert plan.baseline is not None and plan.baseline.variant == "vanilla"
    chosen, vanilla = plan.chosen, plan.baseline
    frozen = 2 * 50_331_648 * plan.config.tokens_per_step
    assert vanilla.flops.executed - chosen.flops.executed == pytest.approx(frozen)
    assert vanilla.flops.model == chosen.flops.model == vanilla.flops.executed
    # On 16 GPUs, at the rate of weight gradients.
    saved = vanilla.seconds.compute - chosen.seconds.compute
    assert saved == pytest.approx(frozen / 16 / 190e12)
    assert chosen.memory.activations == vanilla.memory.activations
    assert planned("large", "attention.variant=vanilla").baseline is None


def test_every_phase_has_its_memory_its_flops_and_its_time() -> None:
    plan = planned("large", *FREEZES)
    trained, frozen = plan.chosen.phases
    assert (trained.first_step, trained.steps) == (1, round(plan.config.total_steps / 4))
    assert frozen.first_step == trained.steps + 1
    assert trained.steps + frozen.steps == plan.config.total_steps
    vanilla, orthogonal = (
        planned("large", f"attention.variant={name}").chosen for name in ("vanilla", "orthogonal")
    )
    assert plan.chosen.flops == trained.flops and trained.flops == vanilla.flops
    assert frozen.flops == orthogonal.flops
    assert trained.memory.states.weights == vanilla.memory.states.weights
    assert frozen.memory.states == orthogonal.memory.states
    rows = trained.parameters.trainable - frozen.parameters.trainable
    assert trained.checkpoint_bytes - frozen.checkpoint_bytes == 8 * rows  # two moments
    seconds = sum(phase.steps * phase.seconds.total for phase in plan.chosen.phases)
    assert plan.chosen.speed.run_gpu_hours == pytest.approx(16 * seconds / 3600)
    text = report.render(plan)
    assert "phase from step" in text
    assert plan.baseline is not None  # though it is of the same variant
    assert "vanilla, as set  vanilla  difference" in text
    steps = [phase["steps"] for phase in as_json(plan)["chosen"]["phases"]]
    assert steps == [trained.steps, frozen.steps]


def test_the_run_follows_from_the_step() -> None:
    plan = planned("large", price=2.5)
    speed, step = plan.chosen.speed, plan.chosen.seconds.total
    assert speed.run_gpu_hours == pytest.approx(16 * step * plan.config.total_steps / 3600)
    assert speed.run_days == pytest.approx(speed.run_gpu_hours / 16 / 24)
    assert speed.run_kwh == pytest.approx(speed.run_gpu_hours * 0.4)
    assert speed.run_cost == pytest.approx(speed.run_gpu_hours * 2.5)
    assert speed.mfu == pytest.approx(plan.chosen.flops.model / (step * 16 * 312e12))
    assert speed.hfu is not None and speed.mfu is not None and speed.mfu_full_attention is not None
    assert speed.hfu < speed.mfu < speed.mfu_full_attention
    assert planned("demo", gpus=2).chosen.speed.mfu is None  # fp32


@pytest.mark.parametrize(
    "variant", ["orthogonal", "vanilla", "hybrid", "unfreeze", "synthesizer_factorized"]
)
@pytest.mark.parametrize("config", ["demo", "small", "base", "large", "small_modern"])
def test_the_text_is_eighty_columns_wide_and_marks_every_number(config: str, variant: str) -> None:
    overrides = [f"attention.variant={variant}", "model.qk_norm=false"]  # some have no queries
    plan = planned(config, *overrides, gpus=2, gpu="l40s", price=1)
    lines = report.render(plan).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    tables = [line for line in lines if line[:3].strip() in ("=", "~")]
    assert len(tables) > 20
    names = {name for _, name in report.MEMORY.values()}
    names |= {"step", "tokens/s", "days", "kWh", "cost"}
    names |= {"MFU, %", "HFU, %"} if config != "demo" else set()
    # Beside a long variant a long name takes two lines.
    missing = [n for n in names if not any(line[3:].startswith(n[:15]) for line in tables)]
    assert missing == []
    assert any("No GPU was used" in line for line in lines[3:5]) and "Assumed:" in lines


def test_json_has_the_same_content() -> None:
    plan = planned("large", price=2.5)
    answer = json.loads(json.dumps(as_json(plan), allow_nan=False))
    assert answer["chosen"]["variant"] == "orthogonal"
    assert answer["baseline"]["variant"] == "vanilla"
    exact, estimate = answer["chosen"]["exact"], answer["chosen"]["estimate"]
    assert exact["memory_bytes"] == {
        "weights": 570_101_760,
        "frozen_bank": 100_663_296,
        "gradients": 1_140_203_520,
        "master_weights": 71_262_720,
        "adam_moments": 142_525_440,
    }
    in_passing = ("autograd_gradients", "activations", "logits", "communication_buffers", "context")
    parts = sum(estimate["memory_bytes"][name] for name in in_passing)
    assert sum(exact["memory_bytes"].values()) + parts == estimate["memory_bytes"]["peak"]
    seconds = dict(estimate["step_seconds"])
    assert seconds.pop("total") == pytest.approx(sum(seconds.values()))
    assert (answer["nodes"], answer["gpu"]["watts"], len(answer["assumptions"])) == (2, 400, 9)


@pytest.mark.parametrize(
    ("gpus", "size", "said"),
    [
        (1024, 1, "times 1024 data-.* go: 16, with data.micro_batch_size=1 also 400)"),
        (12, 1, "times 12 data-.* go: 8 or 16, with data.micro_batch_size=1 also 10)"),
        (3, 2, "3 processes cannot be divided.* that go: 2 or 4)"),
        (1, 2, "too few ranks.* that go: 2)"),
    ],
)
def test_a_number_of_gpus_that_does_not_go_is_answered_with_those_that_do(
    gpus: int, size: int, said: str
) -> None:
    with pytest.raises(UserError, match=said.replace(")", r"\)$")):
        planned("large", f"parallel.tensor_model_parallel_size={size}", gpus=gpus)


@pytest.mark.parametrize("variant", ["orthogonal", "synthesizer_random"])
def test_recomputed_attention_makes_its_products_once_more(variant: str) -> None:
    """Full recomputation is a second forward pass, but for the logits."""
    changes = (f"attention.variant={variant}", "performance.cross_entropy=megatron")
    none, full = (
        planned("demo", *changes, f"performance.recompute={part}", gpus=2)
        for part in ("none", "full")
    )
    config = full.config
    logits = 2 * config.shape.hidden_size * config.shape.vocab_size
    forward = forward_flops_per_token(config.shape, config.policy)
    again = full.chosen.flops.executed - none.chosen.flops.executed
    assert again == config.tokens_per_step * (forward - logits)


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ([], 49_152),
        (["attention.frozen_roles=query"], 0),  # trained keys are kept, and queries with them
    ],
)
def test_recomputed_queries_and_keys_are_those_of_frozen_factors(
    changes: list[str], again: int
) -> None:
    changes = ["attention.variant=monarch", "performance.compile=none", *changes]
    none, recomputed = (
        planned("demo", *changes, f"performance.recompute={part}", gpus=2)
        for part in ("none", "query_key")
    )
    more = recomputed.chosen.flops.executed - none.chosen.flops.executed
    assert more == again * none.config.tokens_per_step


@pytest.mark.parametrize(
    "changes",
    [
        [
            "attention.variant=monarch_shared_conv",
            "optimizer.learning_rate_factors={'*_taps': 3, '*.linear_proj.weight': 2}",
            "telemetry.spectral_norms=['*_taps']",
            "telemetry.weights_every=50",
        ],
        [
            "attention.variant=monarch",
            "performance.recompute=query_key",
            "performance.compile=none",
        ],
    ],
)
def test_what_the_baseline_lacks_is_left_out_there(changes: list[str]) -> None:
    plan = planned("large", *changes)
    assert plan.baseline is not None and plan.refusal is None
    assert plan.baseline.flops == planned("large", "attention.variant=vanilla").chosen.flops


def test_a_baseline_that_is_refused_is_one_sentence_of_the_plan() -> None:
    plan = planned("large", "deepspeed.config=zero3", baseline="unfreeze")
    text = " ".join(report.render(plan).split())
    assert "without --baseline unfreeze: attention.phases changes in the middle" in text
    assert as_json(plan)["baseline"] is None
    assert as_json(plan)["baseline_refusal"].startswith("attention.phases changes")


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    card = find_gpu("h200").model_dump() | {"name": "mine", "memory_gb": 10, "watts": 250}
    path = tmp_path / "card.json"
    path.write_text(json.dumps(card))
    plan = planned("large", gpu=str(path))
    assert plan.gpu.watts == 250 and not plan.fit.fits
    for changed, said in (
        ({"wats": 3}, "unknown key 'wats'; did you mean 'watts'?"),
        ({"watts": -1}, "'watts' is -1"),
        ({"gpus_per_node": "many"}, "'gpus_per_node' is 'many'"),
    ):
        path.write_text(json.dumps(card | changed))
        with pytest.raises(UserError, match=r"card .*card\.json: ") as refused:
            find_gpu(str(path))
        assert said in str(refused.value)
    path.write_text("[1]")
    with pytest.raises(UserError, match=r"^card .*card\.json must be a mapping, one `key: value`"):
        find_gpu(str(path))
    path.write_text(json.dumps({key: value for key, value in card.items() if key != "watts"}))
    with pytest.raises(UserError, match="'watts' is missing: Power of the board"):
        find_gpu(str(path))


def test_a_card_that_is_not_known_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match="--gpu 'a100-80' is not a card that is known; did you mean 'a100-80gb'"
    ):
        find_gpu("a100-80")
    with pytest.raises(
        UserError, match=r"'nowhere.yaml' cannot be read|nowhere.yaml cannot be read"
    ):
        find_gpu("nowhere.yaml")
    assert find_gpu("H200") is GPUS["h200"]


def test_a_baseline_that_is_not_known_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"--baseline vanila: .*known variants: vanilla"):
        planned("large", baseline="vanila")


def test_the_largest_micro_batch_is_the_largest() -> None:
    plan = planned(
        "large", "data.sequence_length=2048", "data.micro_batch_size=5", gpus=8, gpu="a100-40gb"
    )
    fit = plan.fit
    sizes = divisors(plan.config.data.global_batch_size // 8)
    assert fit.largest_micro_batch_size is not None and fit.fits

    def peak(micro_batch: int) -> int:
        changes = ["data.sequence_length=2048", f"data.micro_batch_size={micro_batch}"]
        return memory_of(workload_of(resolve(load_config("large", changes), 8))).peak

    fitting = [size for size in sizes if peak(size) <= fit.memory_bytes]
    assert fitting == [size for size in sizes if size <= fit.largest_micro_batch_size]
    assert fit.largest_micro_batch_peak_bytes == peak(fit.largest_micro_batch_size)


@pytest.mark.distributed  # seconds
def test_what_is_advised_makes_it_fit() -> None:
    changes = ("data.micro_batch_size=50", "data.sequence_length=4096")
    plan = planned("large", *changes, gpus=8, gpu="a100-40gb")
    assert not plan.fit.fits and plan.fit.changes
    for change in plan.fit.changes:
        again = planned("large", *changes, *change.settings, gpus=8, gpu="a100-40gb")
        assert (again.fit.peak_bytes, again.fit.fits) == (change.peak_bytes, change.fits)
    first = next(change for change in plan.fit.changes if change.fits)
    assert f"Set {' '.join(first.settings)}: " in report.render(plan).replace("\n", " ")


def test_nothing_makes_it_fit() -> None:
    fit = fit_of(resolve(load_config("large"), 16), memory=10**9)
    assert fit.largest_micro_batch_size is None and not any(change.fits for change in fit.changes)


def test_young_and_daly_lose_least() -> None:
    def lost(every: int) -> float:
        share = cost(every).lost_share
        assert share is not None
        return share

    def cost(every: int) -> Saving:
        return saving(
            4 * 10**9, every, step_seconds=0.2, nodes=2, write_gb_s=2.0, mtbf_hours=1000.0
        )

    without_saves = cost(0)
    assert (
        without_saves.lost_share is None
        and without_saves.every_seconds is None
        and without_saves.write_seconds == 2.0
    )
    assert (
        without_saves.lost_share_at_young_daly
        == lost(without_saves.young_daly_steps)
        <= min(lost(1000), lost(10_000), lost(20_000), lost(10**6))
    )
    assert without_saves.mean_hours_between_failures == 500.0  # of one of two nodes
    assert without_saves.young_daly_steps == 13_416  # √(2 × 2 s × 1,800,000 s) / 0.2 s


def test_horizon_batch_and_rate_are_those_of_the_rules_by_hand() -> None:
    """`small`: with embeddings 32,000 × 512 and positions 512 × 512.

    Six layers of 4 × 512² + 2 × 512 × 2,048 + 4 × 512, and a last norm of 2 × 512. By logarithms,
    log10 of 20 N is 8.85167: 0.571 of that and log10 0.58 are 4.81773, a batch of 65,725; log10 of
    the N without embeddings is 7.27618: 0.25285 − 0.713 × 7.27618 + 0.307 × 8.85167 is −2.21760.
    """
    for variant in ("orthogonal", "vanilla", "monarch_shared_conv"):
        horizon = planned("small", f"attention.variant={variant}", gpus=8, chinchilla=20).horizon
        assert horizon is not None and horizon.parameters == 35_533_824
        assert horizon.inner_parameters == 35_533_824 - 32_000 * 512 - 512 * 512
        assert horizon.tokens == 710_676_480
        assert horizon.batch_tokens == pytest.approx(10**4.81773, rel=2e-5)
        assert horizon.learning_rate == pytest.approx(10**-2.21760, rel=1e-3)
        assert horizon.global_batch_size == 120  # of 5 × 8 the multiple nearest to 65,725 / 512
        assert horizon.steps == -(-710_676_480 // (120 * 512)) and horizon.warmup_steps == 1156


@pytest.mark.parametrize(
    ("config", "overrides", "rate_is_set"),
    [
        ("demo", (), True),
        ("base", ("schedule.cycles=1", "parallel.tensor_model_parallel_size=2"), True),
        ("large", ("optimizer.kind=muon", "schedule.tokens=null", "schedule.flops=1e20"), True),
        ("large", ("optimizer.kind=muon", "optimizer.muon.update_scale=spectral"), False),
    ],
)
def test_the_overrides_of_a_horizon_give_a_run_of_that_horizon(
    config: str, overrides: tuple[str, ...], rate_is_set: bool
) -> None:
    asked = planned(config, *overrides, gpus=2, chinchilla=20)
    text = report.render(asked)
    answer = as_json(asked)["horizon"]
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(answer["overrides"]) in " ".join(text.split())
    pasted = planned(config, *overrides, *answer["overrides"], gpus=2, chinchilla=20)
    assert pasted.config.total_steps == answer["steps"]
    assert pasted.config.schedule.tokens == answer["tokens"]
    assert pasted.config.data.global_batch_size == answer["global_batch_size"]
    rate = pasted.config.optimizer.learning_rate
    assert (rate == answer["learning_rate"]) is rate_is_set
    assert pasted.horizon is not None and asked.horizon is not None
    same = [word for word in asked.horizon.overrides if not word.endswith("null")]
    assert list(pasted.horizon.overrides) == same
    assert "horizon" not in as_json(planned(config, gpus=2))


def test_the_rates_of_muons_other_weights_move_with_its_own() -> None:
    asked = planned("base_modern", gpus=8, chinchilla=20)
    assert asked.horizon is not None
    section = planned("base_modern", *asked.horizon.overrides, gpus=8).config.optimizer
    rates = (section.muon.embedding_learning_rate, section.muon.vector_learning_rate)
    assert rates == (section.learning_rate, section.learning_rate)
