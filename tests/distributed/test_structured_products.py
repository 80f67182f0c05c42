"""performance.structured_products: a layer by the kernel's operator.

Also the choice on several ranks.
"""

from __future__ import annotations

from tests.distributed.test_performance import WORKER, attention, compare, layout, overrides
from tests.ranks import run_ranks


def test_the_operator_of_structured_rows_computes_the_same_in_a_layer() -> None:
    """The sums are of another order: it computes in fp32 by other products."""
    kinds = [
        ("monarch", False, "none"),
        ("monarch", True, "layers"),
        ("monarch-hybrid-low_rank", True, "none"),
    ]
    cases = [
        {
            "overrides": [
                *overrides(**layout(2, sequence_parallel), **attention(design)),
                f"performance.compile={compiled}",
            ],
            "ways": {"one": [], "other": []},
            "by_operator": "other",
        }
        for design, sequence_parallel, compiled in kinds
    ]
    for kind, report in zip(kinds, compare(2, cases), strict=True):
        assert report["compared"] > 10
        assert report["loss"] < 1e-6 and report["gradients"] < 5e-6, (kind, report)
        assert (
            report["breaks"] == 0 and report["collectives"]["one"] == report["collectives"]["other"]
        )


def test_structured_rows_are_multiplied_by_without_the_kernel_on_the_cpu() -> None:
    keys = ("auto", "products", "kernel")
    runs = [
        overrides(
            **layout(2, False), attention__variant="monarch", performance__structured_products=key
        )
        for key in keys
    ]
    runs.append(overrides(**layout(2, False), performance__structured_products="kernel"))
    auto, products, kernel, dense = run_ranks(2, f"{WORKER}:structured_choices", {"runs": runs})
    assert auto == {
        "way": "two products",
        "reason": "it is for CUDA, and this is the CPU",
        "milliseconds": {},
    }
    assert products == {"way": "two products", "reason": "as configured", "milliseconds": {}}
    assert kernel == (
        "performance.structured_products=kernel cannot be had: it is for CUDA, and this is the "
        "CPU; use auto or products"
    )
    assert dense is None
