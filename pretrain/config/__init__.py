"""The configuration of a run: one typed, frozen tree, from YAML and dotted overrides.

setting     declaration of a key: meaning, range, and how the rest of the program treats the key
sections    the sections but attention; `types`: their base class and the types of values
attention   the attention section, from the policy's axes
tree        the whole configuration, and the values that follow from others
arguments   CONFIG and overrides on the command line
keys        all keys with their records; changes at a resume
sources     YAML files, overrides, and where each value came from
refusals    combinations that cannot be
load        the way to get a configuration: sources, then tree, then refusals; sentences about mistakes
deepspeed   the dictionary for DeepSpeed
phases      phases of a run that trains more weights from some step on
schedule    learning rate as a function of the step
show        the verb of that name
reference   docs/configuration.md, generated
"""
