"""What a run says of itself while it trains; on rank 0 only, but for profiles.

telemetry           takes a step's record and hands its metrics to the files and the console
records             what the loop measures in a step, and what stays the same through a run
metrics             a record's metrics, by the tags of `runs.tags`
loss_window         the variance of recent losses
event_file          TensorBoard's file
samples             prompts and their continuations, for TensorBoard
weights_and_biases  the same for wandb, if it is asked for
hparams             TensorBoard's HParams page
profile             a trace and a table of a few steps; on every rank that is asked for
kernels             classes of kernels, by their names
console             a bar on a terminal, plain lines in a log
"""
