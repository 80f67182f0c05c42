"""Which phase a step is in, what a schedule of phases may not be, and how it is shown."""

import pytest

from megatron_patches.recipe.counting import executed_flops_per_token
from pretrain.config.load import load_config, parse_config
from pretrain.config.schedule import rates_before_freezing
from pretrain.config.show import render_show
from pretrain.config.tree import Config
from tests.pretrain.config.configurations import refusal

UNFREEZE = "attention.variant=unfreeze"


def schedule(*entries: str, variant: str = "unfreeze") -> list[str]:
    return [f"attention.variant={variant}", f"attention.phases=[{', '.join(entries)}]"]


def test_the_variants_own_schedule_is_that_of_thirds() -> None:
    first, second, third = load_config("demo", [UNFREEZE]).phases
    assert (first.first_step, first.learning_rate_factor, first.newly_trainable) == (1, 1.0, ())
    assert (second.first_step, second.learning_rate_factor, second.newly_trainable) == (
        73,
        0.5,
        (2, 3),
    )
    assert (third.first_step, third.learning_rate_factor, third.newly_trainable) == (
        145,
        0.2,
        (0, 1),
    )


@pytest.mark.parametrize(
    ("step", "number"), [(0, 0), (1, 0), (72, 0), (73, 1), (144, 1), (145, 2), (240, 2), (999, 2)]
)
def test_a_step_belongs_to_one_phase(step: int, number: int) -> None:
    assert load_config("demo", [UNFREEZE]).phase_at(step).number == number


def test_other_variants_have_one_phase() -> None:
    for variant in ("vanilla", "orthogonal", "hybrid"):
        config = load_config("demo", [f"attention.variant={variant}"])
        assert [phase.number for phase in config.phases] == [0]
        assert config.phase_at(240).learning_rate_factor == 1.0


def test_what_is_frozen_in_each_phase() -> None:
    config = load_config("demo", schedule("{at: 0.25, train: 3}", "{at: 0.5, train: 1-3}"))
    frozen = [
        [layer for layer, heads in enumerate(config.policy.frozen_groups(4, 4, phase)) if heads]
        for phase in range(3)
    ]
    assert frozen == [[0, 1, 2, 3], [0, 1, 2], [0]]
    assert config.policy.frozen_groups(4, 4, 1)[0] == (0, 1, 2, 3)
    early = load_config("demo", schedule("{at: 0.005, train: 3}")).phases[1]
    assert (early.first_step, early.learning_rate_factor) == (2, 1.0)


def test_a_schedule_survives_config_yaml() -> None:
    config = load_config("demo", schedule("{at: 0.25, train: 3, learning_rate_factor: 2}"))
    again = parse_config(config.as_dict())
    assert again.policy == config.policy
    assert again.phases == config.phases
    assert again.phases[1].learning_rate_factor == 2.0


def test_the_former_key_is_read_as_entries_that_train() -> None:
    former = load_config("demo", [UNFREEZE, "attention.unfreeze=[{at: 0.25, layers: 3}]"])
    assert former.policy == load_config("demo", schedule("{at: 0.25, train: 3}")).policy
    values = load_config("demo", [UNFREEZE]).as_dict()
    values["attention"] |= {"unfreeze": None}  # as the config.yaml of any other variant had it
    assert (
        parse_config(values).as_dict()["attention"]
        == load_config("demo", [UNFREEZE]).as_dict()["attention"]
    )


def kinds(config: Config, phase: int) -> list[set[str]]:
    """The kinds of the tensors of queries and keys in each layer."""
    kinds_by_layer = [set[str]() for _ in range(4)]
    for tensor in config.inventories[phase]:
        if "query_key" in tensor.name and tensor.layer is not None:
            kinds_by_layer[tensor.layer].add(tensor.kind)
    return kinds_by_layer


def test_layers_are_frozen_as_they_are_and_stay_so() -> None:
    entries = ("{at: 0.25, freeze: 0%-50%}", "{at: 0.5, freeze: all, learning_rate_factor: 0.5}")
    config = load_config("demo", schedule(*entries, variant="vanilla"))
    assert [phase.newly_kept for phase in config.phases] == [(), (0, 1), (2, 3)]
    trained, kept = {"ordinary"}, {"kept"}
    assert [kinds(config, n) for n in range(3)] == [
        [trained] * 4,
        [kept, kept, trained, trained],
        [kept] * 4,
    ]
    spans = {tensor.span for tensor in config.inventories[0] if "query_key" in tensor.name}
    assert spans == {(0, 1), (0, 2)}
    assert config.fullest_phase == 0
    costs = [executed_flops_per_token(config.shape, config.policy, n) for n in range(3)]
    assert costs[0] - costs[1] == costs[1] - costs[2] == 2 * 2 * 2 * 128 * 128


def test_rows_may_be_trained_for_a_while_and_frozen_again() -> None:
    entries = ("{at: 0.25, train: all}", "{at: 0.5, freeze: 0-1}")
    config = load_config("demo", schedule(*entries, variant="orthogonal"))
    assert [sorted(set().union(*kinds(config, n))) for n in range(3)] == [
        ["frozen"],
        ["ordinary"],
        ["kept", "ordinary"],
    ]
    assert config.fullest_phase == 1


def test_a_layer_that_trains_from_the_start_does_not_begin_to_train() -> None:
    """Nor does naming it change what it starts from."""
    heads = "attention.frozen_heads={0: 1, 1-3: 0}"
    without = load_config("demo", ["attention.variant=hybrid", heads])
    config = load_config("demo", [*schedule("{at: 0.5, train: all}", variant="hybrid"), heads])
    assert config.phases[1].newly_trainable == (0,)
    starts, plain = (
        {tensor.name: tensor.start for tensor in configuration.inventories[0]}
        for configuration in (config, without)
    )
    layer = "decoder.layers.{}.self_attention.linear_qkv.trained_query_key"
    assert [starts[layer.format(number)] for number in (1, 2, 3)] == ["normal"] * 3
    of_first = {name: start for name, start in plain.items() if ".0." in name}
    assert of_first and starts.items() >= of_first.items()


def test_the_trained_heads_beside_frozen_ones_are_frozen_too() -> None:
    entries = ["attention.frozen_heads={0-1: 0.5}", "attention.adapters=[low_rank]"]
    config = load_config("demo", [*schedule("{at: 0.5, freeze: all}", variant="hybrid"), *entries])
    assert kinds(config, 0)[0] == {"frozen", "ordinary"} and kinds(config, 1)[0] == {
        "frozen",
        "kept",
    }


@pytest.mark.parametrize(
    ("step", "factors"),
    [
        (1, {1: 1.0, 3: 1.0}),
        (30, {1: 1.0, 3: 1.0}),
        (31, {1: 29 / 30, 3: 1.0}),
        (59, {1: 1 / 30, 3: 1.0}),
        (60, {1: 0.0, 3: 1.0}),
        (61, {1: 0.0, 3: 1.0}),
        (182, {1: 0.0, 3: 10 / 12}),
        (240, {1: 0.0, 3: 0.0}),
    ],
)
def test_the_rate_of_rows_falls_before_they_freeze(step: int, factors: dict[int, float]) -> None:
    entries = (
        "{at: 0.25, freeze: 0, decay_steps: 30}",
        "{at: 0.5, freeze: 1}",
        "{at: 0.8, freeze: all, decay_steps: 12}",
    )
    config = load_config("demo", schedule(*entries, variant="vanilla"))
    assert rates_before_freezing(config.phases, step) == factors
    assert parse_config(config.as_dict()).phases == config.phases
    shown = " ".join(render_show("demo", schedule(*entries, variant="vanilla")).split())
    assert "layer 0 are frozen), learning rate x 1; that of these rows falls to 0 over the" in shown


def test_show_lists_the_phases() -> None:
    shown = " ".join(render_show("demo", [UNFREEZE]).split())
    halfway = "from step 73 on 1,247,488 trainable (Query/Key of layer 2, 3 train too), "
    halfway += "learning rate x 0.5"
    assert halfway in shown
    assert "from step 145 on 1,313,024 trainable" in shown  # all there are
    frozen = schedule("{at: 0.25, freeze: 0-1}", variant="vanilla")
    shown = " ".join(render_show("demo", frozen).split())
    assert "from step 61 on 1,247,488 trainable (Query/Key of layer 0, 1 are frozen)" in shown


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [UNFREEZE, "deepspeed.config=zero3"],
            "ZeRO stage 3; set deepspeed.config=auto, zero1 or zero2",
        ),
        (schedule("{at: 0.001, train: 1}"), "entry 1 (at: 0.001) is after step 0 of 240"),
        (schedule("{at: 0.999, train: 1}"), "entry 1 (at: 0.999) is after step 240 of 240"),
        (
            schedule("{at: 0.5, train: 1}", "{at: 0.4, train: 2}"),
            "entry 2 (at: 0.4) is after step 96 of",
        ),
        (
            schedule("{at: 0.5, train: 1}", "{at: 0.501, train: 2}"),
            "entry 2 (at: 0.501) is after step 120",
        ),
        (
            schedule("{at: 0.5, train: 1-2}", "{at: 0.6, train: 2}"),
            "entry 2 (train: 2) makes no further",
        ),
        (schedule("{at: 0.5, train: 4}"), "attention.phases: layers '4' do not exist"),
        (schedule("{at: 0.5, train: upper}"), "attention.phases: 'upper' names no layers"),
        (schedule("{at: 1.5, train: 1}"), "attention.phases"),
        (schedule("{at: 0.5, train: 1, factor: 2}"), "factor"),
        (schedule("{at: 0.5, train: 1, learning_rate_factor: 0}"), "learning_rate_factor"),
        (schedule("{at: 0.5}"), "entry 1 (at: 0.5) names no layers; give freeze or train"),
        (
            schedule("{at: 0.5, train: 1, decay_steps: 9}"),
            "entry 1 (decay_steps: 9) freezes no layer whose rate could fall; give freeze",
        ),
        (
            schedule("{at: 0.25, freeze: 1, decay_steps: 61}", variant="vanilla"),
            "entry 1 (decay_steps: 61) is after step 60, so the decay would begin before the run",
        ),
        (schedule("{at: 0.5, freeze: all}"), "(freeze: all) freezes no layer of the 4 that trains"),
        (
            schedule("{at: 0.5, train: 1-2}", "{at: 0.6, freeze: 2}", "{at: 0.7, train: all}"),
            "entry 3 (train: all) trains layer 2, which entry 2 freezes",
        ),
        (
            schedule("{at: 0.3, train: 1}", "{at: 0.5, train: 1-2, freeze: 1}"),
            "entry 2 (train: 1-2, freeze: 1) trains and freezes layer 1",
        ),
        (
            schedule("{at: 0.3, train: 0}", "{at: 0.5, train: 1, freeze: 0-1}"),
            "entry 2 (train: 1, freeze: 0-1) trains and freezes layer 1; name it once",
        ),
        (
            [
                *schedule("{at: 0.5, train: 2-3}", variant="hybrid"),
                "attention.frozen_heads={0-1: 1, 2-3: 0}",
            ],
            "entry 1 (train: 2-3) makes no further layer of the 4 trainable",
        ),
        (schedule("{at: 0.5, train: 1}", variant="vanilla"), "which train from the start"),
        (schedule("{at: 0.5, train: 1}", variant="monarch"), "frozen as whole matrices"),
        (schedule("{at: 0.5, train: 1}", variant="orthogonal_shared"), "frozen as whole matrices"),
        *(
            (schedule("{at: 0.5, freeze: 1}", variant=variant), "needs rows of queries and keys")
            for variant in ("low_rank", "synthesizer_random", "orthogonal_penalty")
        ),
        (
            [*schedule("{at: 0.5, freeze: 1}", variant="vanilla"), "deepspeed.config=zero0"],
            "attention.phases changes in the middle of the run what is trained",
        ),
        (
            [*schedule("{at: 0.5, train: 1}"), "attention.unfreeze=[{at: 0.5, layers: 1}]"],
            "attention.unfreeze is the former name of attention.phases",
        ),
        (["attention.unfreeze=[{at: 0.5, layers: 9}]"], "attention.phases: layers '9'"),
        ([UNFREEZE, "attention.adapters=[low_rank]"], "without adapters"),
        ([UNFREEZE, "attention.frozen_heads={'0': 0.5}"], "attention.phases trains whole layers"),
        (["attention.penalty=1"], "attention.penalty does not apply to variant 'orthogonal'"),
        (["attention.variant=orthogonal_penalty", "attention.penalty=0"], "attention.penalty"),
        (["attention.variant=dct", "attention.construction=qr"], "contradicts variant 'dct'"),
        (
            ["attention.variant=hadamard", "model.hidden_size=96"],
            "hidden_size=96 is not a power of two",
        ),
    ],
)
def test_impossible_schedules_and_axes_are_refused(overrides: list[str], problem: str) -> None:
    """The demo has 4 layers and 240 steps."""
    assert problem in refusal("demo", *overrides, ranks=2)
