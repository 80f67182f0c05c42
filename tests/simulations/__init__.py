"""Simulated campaigns that hold a statistic of `pretrain` against its promise; each is run by hand.

compute_coverage  coverage of the intervals that `compare` gives effective compute
trial_campaigns   `trial`: false answers at every stopping time, and pairs at d_z = 1
"""
