"""The verbs `try` and `demo`: text to trained models and a page that compares them.

verbs   `try` and `demo`
arms    the variants of a trial, and which of them is the baseline
sizes   model, tokens and vocabulary for a text, a machine and some minutes
texts   which files hold text; the beginning of a data set
trial   the steps, each a command that a user could give
"""
