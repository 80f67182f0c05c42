"""The configuration of a run: one typed, frozen tree, from YAML and dotted overrides.

sections    all sections except attention, model and optimizer
types       declaration of a key, base class of sections, types of values
attention   the attention section, from the policy's axes
model       the model section: shape, parts, start
optimizer   the optimizer section, and the rule and rate of each tensor
tree        the whole configuration, and the values that follow from others
arguments   CONFIG and overrides on the command line
keys        all keys with their records; changes at a resume
sources     YAML files, overrides, and where each value came from
refusals    combinations of values that are refused; layout_refusals: with ranks or a ZeRO stage
load        sources, tree and refusals in order; sentences about mistakes
foreign     the configuration of a stranger's run, which then names nothing to write to
deepspeed   the settings for DeepSpeed
removed     settings of earlier versions, each with what to use instead
resolved    a configuration on a number of ranks: layout and DeepSpeed settings, made once
schedule    learning rate and training phases as functions of the step
show        the verb of that name
"""
