"""Records of a run while it trains, on rank 0 only; profiles are on any rank.

telemetry           hands a step's metrics to the files and the console
records             measurements of a step, and facts that stay the same through a run
metrics             metrics of a record, by the tags of `runs.tags`; variance of recent losses
event_file          TensorBoard's file, with the prompts' continuations
weights_and_biases  the same scalars for wandb, an optional package
hparams             hyperparameters for TensorBoard's HPARAMS page
profile             a trace of a few steps, and a table of their kernels
console             a bar on a terminal, plain lines in a log
"""
