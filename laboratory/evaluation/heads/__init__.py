"""Experiments of `evaluate diversity`, `length` and `approximation`, with their reports.

diversity        differences between the heads of a layer, in weights and in attention (E4)
length           perplexity at other lengths than the trained one (E5)
approximation    error of function regression, by width and depth (E1)
trained_model    model of a finished run, on one process
"""

import laboratory.study.packages  # noqa: F401  # before any module that imports them
