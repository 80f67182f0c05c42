"""Comparison of finished runs, read from disk: several seeds of several variants, one the baseline.

comparison     the comparison as one value, `Comparison`, with the measured cost
compare_runs   makes it of finished runs
comparability  facts that must be equal, or may be the subject, and notes on other differences
compute        equal compute: learning curves, tokens and cost to the baseline's loss
convergence    tokens to the baseline's loss, loss variance, gradient norms
theory         the same by formula
trend          change of the gap with a subject that is a number
tables         tables for the report and the terminal
figures        figures of the training loss and the gap
loss_files     losses of other trainers, from tables and metric files
event_files    scalars of TensorBoard's event files, without dead attempts
losses         these compared: questions, their answers, report
summary        the sentences below "In short"
report         the page, the terminal's summary, TensorBoard links; writes everything
"""

import laboratory.study.packages  # noqa: F401  # before any module that imports them
