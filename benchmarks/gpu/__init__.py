"""Measurements on a machine with a GPU, as stages of `make gpu-check` (tests/gpu_check).

card          the rates of a card
steps         training steps of one shape, and each switch
measurements  what a process measures before its time is over
"""
