"""What an optimizer keeps is a sum over the inventory, by the first rule that takes a tensor."""

from __future__ import annotations

from megatron_patches.recipe.optimizers import ADAMW, Rule, checkpoint_bytes, rule_of, state_bytes
from megatron_patches.recipe.tensors import tensors
from pretrain.config.load import load_config


def test_adamw_keeps_two_moments_of_everything_that_trains() -> None:
    config = load_config("demo", ["attention.variant=orthogonal"])
    inventory = tensors(config.shape, config.policy)
    trained = sum(tensor.elements for tensor in inventory if tensor.trains)
    assert trained < sum(tensor.elements for tensor in inventory)
    assert checkpoint_bytes(inventory, config.optimizer.rules) == 12 * trained
    assert state_bytes(inventory, config.optimizer.rules) == 8 * trained
    assert ADAMW.traffic == 28 and not any(map(ADAMW.products, inventory))


def test_each_tensor_has_the_first_rule_that_takes_it() -> None:
    config = load_config("demo", ["attention.variant=vanilla"])
    inventory = tensors(config.shape, config.policy)
    momentum = Rule("momentum", ("velocity",), takes=lambda tensor: tensor.cut == 1)
    rules = (momentum, ADAMW)
    cut = {tensor.name for tensor in inventory if rule_of(tensor, rules) is momentum}
    assert cut == {
        f"decoder.layers.{layer}.{name}.weight"
        for layer in range(config.model.num_layers)
        for name in ("self_attention.linear_proj", "mlp.linear_fc2")
    }
    elements = sum(tensor.elements for tensor in inventory if tensor.name in cut)
    assert (
        checkpoint_bytes(inventory, (ADAMW,)) - checkpoint_bytes(inventory, rules) == 4 * elements
    )
    assert state_bytes(inventory, (ADAMW,)) - state_bytes(inventory, rules) == 4 * elements
