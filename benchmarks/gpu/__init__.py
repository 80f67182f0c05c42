"""The check of a machine with a GPU (`make gpu-check`), and of what a step asks of one (`make gpu-dry`).

check      the command, and its stages in waves
context    the context of a stage, its measurements, and its result
trainings  stages that train by the program's own command
layers     layers of every kind compiled, and the kernel of structured banks
steps      training steps of one shape, and each switch
card       the rates of a card
page       the report as a page
wheels     packages for a machine without a network
dry        a training step counted without a GPU, against bounds
pretended  the GPU that is not there
"""
