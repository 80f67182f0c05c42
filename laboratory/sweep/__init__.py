"""Many runs from one grid file.

grid     the file: axes, filters, the product
names    names of the runs
plan     every run's resolved configuration, and the state of its directory
running  trainings, several at a time
trial    pairs of runs of two designs until a question is answered
verb     the command line
"""
