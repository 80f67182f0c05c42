"""A run, from opening to its last step. Read `loop` first.

loop            the program: forward, backward, update, record, validate, save, stop
open_run        setup before step 1, and every refusal possible before it
rank_zero       collectives in which rank 0 acts for all: locking the run, reading, writing
run_files       files and lines that describe a run at its start and end
earlier         what the files of a run say of its training so far
phase_engine    the live engine, and its successor where a run begins to train other weights
engine          model -> DeepSpeed engine, audited
update          the update of the weights, made only from good numbers, and what is done after it
stability       stop of a run whose numbers stay bad; known good checkpoints
step_numbers    sums over ranks, and seconds of the parts of a step
state_transfer  optimizer state and weights from one engine to the next
validation      losses on held-out text, attention scores, prompts continued
"""
