"""Share of a tensor that a rank has, and the phases in which it trains."""

from __future__ import annotations

from dataclasses import replace

from megatron_patches.recipe.parts import Tensor

ROWS = Tensor("w", (6, 4), "ordinary", cut=0, parts=(("w", 6),))


def test_a_rank_has_its_share_of_what_is_cut() -> None:
    whole = replace(ROWS, cut=None)
    columns = replace(ROWS, cut=1)
    some = replace(ROWS, groups=(False, True, True, True))  # heads of two rows
    assert [[*tensor.rows(6, 1, 2)] for tensor in (ROWS, whole, columns, some)] == [
        [3, 4, 5],
        [*range(6)],
        [*range(6)],
        [4, 5, 6, 7],
    ]
    assert [*some.rows(6, 0, 2)] == [2, 3] and some.rank_shape(0, 2) == (2, 4)
    assert [tensor.rank_shape(1, 2) for tensor in (ROWS, whole, columns, some)] == [
        (3, 4),
        (6, 4),
        (6, 2),
        (4, 4),
    ]
    assert (ROWS.rank_elements(1, 2), ROWS.multiplications) == (12, 24)
    assert replace(ROWS, multiplied=False).multiplications == 0


def test_what_trains_is_stored_and_what_is_kept_too() -> None:
    buffer = replace(ROWS, phase=None)
    kept = replace(buffer, kind="kept")
    assert [(tensor.trains, tensor.stored) for tensor in (ROWS, buffer, kept)] == [
        (True, True),
        (False, False),
        (False, True),
    ]
    assert (ROWS.span, replace(ROWS, phase=1, until=2).span) == ((0, 0), (1, 2))
