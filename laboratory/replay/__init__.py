"""Steps of a run made again, and the first difference between two runs.

prepare   the settings a step had, the checkpoint to begin from, and the start of the ranks
__main__  one rank: train up to the step, and look into it
report    the page of a replayed step; two runs' first difference
verb      the verbs `replay` and `diff`
"""
