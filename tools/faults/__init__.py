"""A campaign of faults: real trainings are disturbed at random, resumed, and compared.

    make faults                              # 60 faults
    python -m tools.faults --seed 1 2 --faults 100
    python -m tools.faults --seed 2 --case 17 --keep /tmp/faults        # one again, files kept

    plan          which faults: everything that is random, drawn from (seed, number of the case)
    starts        one start of the real command, its end, and what it has left behind
    inflict       what is done to a start: signals, file systems that fail, damaged checkpoints
    references    the undisturbed runs, one a layout
    judge         whether a finished run is the undisturbed one
    cases         one case from the fault to the verdict
    table         the outcome in Markdown and JSON

docs/reliability.md has the outcome of a whole campaign.
"""
