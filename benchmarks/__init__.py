"""Side-by-side measurements, run by hand with `python -m`; nothing here is a test.

step        training steps beside plain PyTorch
gpu         what a GPU must show: steps timed, parity, resume (`make gpu-check`)
gpu_dry     host waits and copies of a step on a GPU, counted without one (`make gpu-dry`)
samples     the order of samples, and reading them
bank        making the frozen bank
checkpoint  synchronous and asynchronous saves
inference   exported models
rounds      actions that take turns, their medians and ratios
"""
