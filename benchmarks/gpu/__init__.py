"""The check of a machine with a GPU (`make gpu-check`).

check       the command, and its stages in waves
stage       the context and the result of a stage
trainings   stages that train by the program's own command
compile     layers of every kind, compiled
structured  the kernel of structured banks
steps       training steps of one shape, and each switch
card        the rates of a card
page        the report as a page
wheels      packages for a machine without a network
"""
