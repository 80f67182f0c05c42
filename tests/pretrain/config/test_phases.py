"""Which phase a step is in, what a schedule of phases may not be, and how it is shown."""

import pytest

from pretrain.config.load import load_config, parse_config
from pretrain.config.resolved import resolve
from pretrain.config.show import render_show
from pretrain.errors import UserError

UNFREEZE = "attention.variant=unfreeze"


def schedule(*entries: str) -> list[str]:
    return [UNFREEZE, f"attention.unfreeze=[{', '.join(entries)}]"]


def refusal(*overrides: str) -> str:
    """The sentence with which the demo config (4 layers, 240 steps) is refused."""
    with pytest.raises(UserError) as raised:
        resolve(load_config("demo", overrides), 2)
    return str(raised.value)


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
    config = load_config("demo", schedule("{at: 0.25, layers: 3}", "{at: 0.5, layers: 1-3}"))
    frozen = [
        [layer for layer, heads in enumerate(config.policy.frozen_groups(4, 4, phase)) if heads]
        for phase in range(3)
    ]
    assert frozen == [[0, 1, 2, 3], [0, 1, 2], [0]]
    assert config.policy.frozen_groups(4, 4, 1)[0] == (0, 1, 2, 3)


def test_a_schedule_survives_config_yaml() -> None:
    config = load_config("demo", schedule("{at: 0.25, layers: 3, learning_rate_factor: 2}"))
    again = parse_config(config.as_dict())
    assert again.policy == config.policy
    assert again.phases == config.phases
    assert again.phases[1].learning_rate_factor == 2.0


def test_show_lists_the_phases() -> None:
    shown = " ".join(render_show("demo", [UNFREEZE]).split())
    halfway = (
        "from step 73 on 1,247,488 trainable (also Query/Key of layer 2, 3), learning rate x 0.5"
    )
    assert halfway in shown
    assert "from step 145 on 1,313,024 trainable" in shown  # all there are


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            [UNFREEZE, "deepspeed.config=zero3"],
            "ZeRO stage 3; set deepspeed.config=auto, zero1 or zero2",
        ),
        (schedule("{at: 0.001, layers: 1}"), "entry 1 (at: 0.001) is after step 0 of 240"),
        (schedule("{at: 0.999, layers: 1}"), "entry 1 (at: 0.999) is after step 240 of 240"),
        (
            schedule("{at: 0.5, layers: 1}", "{at: 0.4, layers: 2}"),
            "entry 2 (at: 0.4) is after step 96 of",
        ),
        (
            schedule("{at: 0.5, layers: 1}", "{at: 0.501, layers: 2}"),
            "entry 2 (at: 0.501) is after step 120",
        ),
        (
            schedule("{at: 0.5, layers: 1-2}", "{at: 0.6, layers: 2}"),
            "entry 2 (layers: 2) makes no further",
        ),
        (schedule("{at: 0.5, layers: 4}"), "attention.unfreeze: layers '4' do not exist"),
        (schedule("{at: 0.5, layers: upper}"), "attention.unfreeze: 'upper' names no layers"),
        (schedule("{at: 1.5, layers: 1}"), "attention.unfreeze"),
        (schedule("{at: 0.5, layers: 1, factor: 2}"), "factor"),
        (schedule("{at: 0.5, layers: 1, learning_rate_factor: 0}"), "learning_rate_factor"),
        (["attention.unfreeze=[{at: 0.5, layers: 1}]"], "does not apply to variant 'orthogonal'"),
        ([UNFREEZE, "attention.adapters=[qk_norm]"], "without adapters"),
        ([UNFREEZE, "attention.frozen_heads={'0': 0.5}"], "attention.unfreeze is for whole layers"),
        (["attention.penalty=1"], "attention.penalty does not apply to variant 'orthogonal'"),
        (["attention.variant=orthogonal_penalty", "attention.penalty=0"], "attention.penalty"),
        (["attention.variant=dct", "attention.construction=qr"], "contradicts variant 'dct'"),
        (
            ["attention.variant=hadamard", "model.hidden_size=96"],
            "hidden_size=96 is not a power of two",
        ),
    ],
)
def test_impossible_schedules_and_axes_are_refused(overrides: list[str], named: str) -> None:
    sentence = refusal(*overrides)
    assert named in sentence
    assert "\n" not in sentence
