"""Measurements on a machine with a GPU, as stages of `make gpu-check` (tests/gpu_check), and packages for it.

card          the rates of a card
steps         training steps of one shape, and each switch
measurements  what a process measures before its time is over
wheels        packages for a machine without a network
"""
