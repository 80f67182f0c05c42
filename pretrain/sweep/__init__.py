"""Many runs from one grid file.

grid     the file: axes, filters, the product
names    a name for each run
plan     each run's resolved configuration, and what is done already
running  start the trainings, several at a time
verb     the command line
"""
