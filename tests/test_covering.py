"""The selections of the cross products that `make test` runs: nothing that meets in the whole is left out."""

import itertools
from collections import Counter
from operator import itemgetter

import pytest

from tests.distributed import designs, test_designs, test_parity
from tests.distributed.covering import covering, pairs


def test_every_pair_is_in_the_selection_and_the_selection_is_small() -> None:
    cases = list(itertools.product("abc", range(4), (False, True), "xyz"))
    names = ("letter", "number", "flag", "end")
    chosen = covering(cases, lambda case: dict(zip(names, case, strict=True)))
    assert chosen == covering(cases, lambda case: dict(zip(names, case, strict=True)))
    wanted = {pair for case in cases for pair in pairs(dict(zip(names, case, strict=True)))}
    found = {pair for case in chosen for pair in pairs(dict(zip(names, case, strict=True)))}
    assert found == wanted
    assert 12 <= len(chosen) <= 18 and len(cases) == 72


def test_at_least_and_covered() -> None:
    cases = list(itertools.product("abcd", range(3)))

    def factors(case: tuple[str, int]) -> dict[str, object]:
        return {"letter": case[0]}  # one factor: no pairs

    assert covering(cases, factors) == []
    twice = covering(cases, factors, at_least={itemgetter(0): 2})
    assert Counter(letter for letter, _ in twice) == dict.fromkeys("abcd", 2)

    def both(case: tuple[str, int]) -> dict[str, object]:
        return {"letter": case[0], "number": case[1]}

    assert covering(cases, both, covered=cases[:5]) == cases[5:]


@pytest.mark.parametrize("module", [test_designs, test_parity])
def test_the_selection_of_a_cross_product_covers_all_its_pairs(module: object) -> None:
    chosen, reference = module.COVERING, module.REFERENCES  # type: ignore[attr-defined]
    every = [*reference, *chosen, *module.REMAINING]  # type: ignore[attr-defined]
    assert len(set(every)) == len(every)
    run = [*reference, *chosen, *getattr(module, "ELSEWHERE", ())]
    found = {pair for case in run for pair in pairs(module.factors(case))}  # type: ignore[attr-defined]
    assert found >= {pair for case in every for pair in pairs(module.factors(case))}  # type: ignore[attr-defined]
    assert len(chosen) < 0.6 * (len(every) - len(reference))


def test_every_design_has_one_more_layout_and_every_layout_five_designs() -> None:
    assert set(Counter(design for design, _ in test_designs.COVERING)) == set(designs.DESIGNS)
    by_layout = Counter(layout for _, layout in test_designs.COVERING)
    assert set(by_layout) == set(test_designs.LAYOUTS[1:]) and min(by_layout.values()) >= 5
    whole = {(design, layout) for design in designs.DESIGNS for layout in test_designs.LAYOUTS}
    refused = {
        (design, layout)
        for design in ("unfreeze", "early_freeze")
        for layout in test_designs.LAYOUTS
        if layout.zero_stage in (0, 3)
    }
    run = {*test_designs.REFERENCES, *test_designs.COVERING, *test_designs.REMAINING}
    assert run == whole - refused
