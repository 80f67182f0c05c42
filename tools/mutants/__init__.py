"""A score for the fast suite: the share of small faults in the product that fail a test.

    make mutants                                    # 200 faults of seed 1
    python -m tools.mutants --seed 2 --mutants 100
    python -m tools.mutants --case 17               # one again, with the output of its tests
    python -m tools.mutants --modules 'pretrain/export/*.py' --tests tests/pretrain/export

changes    the faults that can be planted in a module: other operators, constants, statements left
out tracing    which fast tests run which lines trials     a process with all third-party imports
that is forked for every mutant

docs/reliability.md has the outcome.
"""
