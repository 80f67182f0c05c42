"""A run, from opening to its last step. Read `loop` first.

loop        the program: forward, backward, update, record, validate, save, stop
open_run    everything that is set up before step 1
run_files   what is written into the run directory at its start and end
engines     the live engine, and the next one where a run begins to train more
engine      model -> DeepSpeed engine, audited
transplant  the state that one engine hands to the next
held_out    loss on held-out text
"""
