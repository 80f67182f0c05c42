"""A score for the fast suite: the share of small faults, planted in the product one by one, that fail a test.

    make mutants                           # 200 of seed 1; or: python -m tools.mutants --seed 2 --mutants 100
    python -m tools.mutants --case 17      # one of them again, with the output of its tests

    places        which modules, and which of their functions are left out, each with its reason
    changes       the faults that can be planted in a module: other operators, constants, statements left out
    touched       which fast tests run which lines, by tracing the fast suite once
    trials        a process with all third-party imports that is forked for every mutant
    score         the share with its interval, and the survivors

docs/reliability.md has the outcome.
"""
