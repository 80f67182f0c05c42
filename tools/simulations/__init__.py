"""Simulations and trainings on made-up data, each run by hand.

compute_coverage  coverage of the intervals that `compare` gives effective compute
retrieval         associative recall and induction, which designs learn them
trial_campaigns   `trial`: false answers at every stopping time, and pairs at d_z = 1
"""
