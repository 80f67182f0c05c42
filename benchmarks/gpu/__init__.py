"""The check of a machine with a GPU, `make gpu-check`: see `__main__`, its stages.

context    the context of a stage, and its result
trainings  stages that train by the program's own command
"""
