"""The selection of the cross product that CI runs leaves out no pair of the whole."""

from collections import Counter

from tests.distributed import designs, test_designs
from tests.distributed.covering import pairs


def test_the_selection_of_the_cross_product_covers_all_its_pairs() -> None:
    run = [*test_designs.REFERENCES, *test_designs.COVERING]
    every = [*run, *test_designs.REMAINING]
    assert len(set(every)) == len(every)
    covered = {pair for case in run for pair in pairs(test_designs.factors(case))}
    assert covered >= {pair for case in every for pair in pairs(test_designs.factors(case))}
    assert len(test_designs.COVERING) < 0.6 * (len(every) - len(test_designs.REFERENCES))


def test_every_design_has_one_more_layout_and_every_layout_three_designs() -> None:
    assert set(Counter(design for design, _ in test_designs.COVERING)) == set(designs.DESIGNS)
    by_layout = Counter(layout for _, layout in test_designs.COVERING)
    assert set(by_layout) == set(test_designs.LAYOUTS[1:]) and min(by_layout.values()) >= 3
    whole = {(design, layout) for design in designs.DESIGNS for layout in test_designs.LAYOUTS}
    no_phases = [layout for layout in test_designs.LAYOUTS if layout.zero_stage in (0, 3)]
    refused = {(design, layout) for design in designs.PHASED for layout in no_phases}
    run = {*test_designs.REFERENCES, *test_designs.COVERING, *test_designs.REMAINING}
    assert run == whole - refused
