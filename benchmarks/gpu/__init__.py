"""The check of a machine with a GPU, `make gpu-check`: see `__main__`, its stages in waves.

context       the context of a stage, and its result
trainings     stages that train by the program's own command
layers        layers of every kind compiled, and the kernel of structured banks
card          the rates of a card
measurements  what a process measures before its time is over
wheels        packages for a machine without a network
"""
