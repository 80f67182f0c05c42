"""A run, from opening to its last step. Read `loop` first.

loop        the program: forward, backward, update, record, validate, save, stop
open_run    everything that is set up before step 1
run_files   what is written into the run directory at its start and end
engines     the live engine, and the next one where a run begins to train more
engine      model -> DeepSpeed engine, audited
adamw       the optimizer that DeepSpeed is given, and its clipping
reduction   gradients over data-parallel ranks, during the backward pass
update      the update, made only from good numbers
step_clock  where the time of a step goes
transplant  the state that one engine hands to the next
held_out    loss on held-out text
prompts     what the model makes of a few prompts
"""
