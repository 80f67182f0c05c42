"""Steps of a run made again, and the first difference between two runs.

prepare   the settings a step had, the checkpoint to begin from, and the start of the ranks
__main__  one rank: train up to the step, and look into it
verb      the verb `replay`, and its page
diff      the verb `diff`: records, checkpoints, then both runs' steps made again
"""
