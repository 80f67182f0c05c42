"""Side-by-side measurements, run by hand with `python -m`; nothing here is a test.

step        training steps beside plain PyTorch
gpu         all that a GPU must show, in eight minutes
data        tokenising, opening shards, the order of samples
results     the pages of docs/results
bank        making the frozen bank
checkpoint  synchronous and asynchronous saves
inference   exported models
compute_coverage  coverage of the intervals that `compare` gives effective compute
trial_campaigns  simulated campaigns of `trial`: false answers, and pairs at d_z = 1
"""
