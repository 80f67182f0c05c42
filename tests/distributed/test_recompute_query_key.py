"""Queries and keys of a structured bank that backward makes again.

`performance.recompute=query_key`.
"""

import itertools

import pytest

from pretrain.config.load import load_config
from tests.distributed.test_performance import LAYOUTS, attention, case, compare, layout


@pytest.mark.parametrize(("tensor_parallel", "sequence_parallel"), LAYOUTS)
def test_structured_queries_and_keys_are_made_again_bit_by_bit(
    tensor_parallel: int, sequence_parallel: bool
) -> None:
    kinds = list(itertools.product(("rope", "learned"), (4, 2)))
    cases = [
        case(
            "recompute",
            ("none", "query_key"),
            model__position_embedding=positions,
            model__num_query_groups=groups,
            **layout(tensor_parallel, sequence_parallel),
            **attention("monarch"),
        )
        for positions, groups in kinds
    ]
    for (positions, groups), report in zip(kinds, compare(tensor_parallel, cases), strict=True):
        assert report["loss"] == 0.0 and report["gradients"] == 0.0, (positions, groups)
        config = load_config("demo", cases[0]["overrides"])
        tokens = config.data.micro_batch_size * config.data.sequence_length
        bytes_of_heads = tokens * config.head_dim * 4 * (4 + groups) // tensor_parallel
        spared = report["saved"]["one"] - report["saved"]["other"]
        assert spared == config.model.num_layers * bytes_of_heads, (positions, groups)
