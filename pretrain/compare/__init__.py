"""Compares finished runs, read from disk only: several variants, several seeds of each, one the baseline.

labels         which runs are samples of one variant, and what each is compared with
comparability  what must be equal, and what else differs
significance   means, paired gaps, tests, Holm's correction
convergence    tokens to the baseline's loss, loss variance, gradient norms
cost, theory   what the runs took, beside what the formulas say
trend          how gaps change with a subject that is a number
provenance     which program and versions trained the runs
comparison     all of it as one `Comparison`
console, report, files, plots, trend_text, trend_plot, overlay     how a `Comparison` is shown
"""
