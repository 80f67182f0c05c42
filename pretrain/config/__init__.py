"""What a run is: one typed, frozen tree, from YAML and dotted overrides.

tree        the whole configuration, and what follows from its values
sections    its sections; `attention` is one of them, `types` their common ground
text        files, overrides, and where each value came from; `yaml_values` is the YAML, `sentences` what is
            said of wrong keys and values
refusals    combinations that cannot be; `initial_weights`: a file of another model
load        the way to get a configuration: text, then tree, then refusals
deepspeed   the dictionary that DeepSpeed is given
phases      when a run begins to train more
schedule    learning rate as a function of the step
show        the verb of that name
"""
