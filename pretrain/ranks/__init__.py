"""Ranks: this process's place among them, their devices and groups, how they start and stop.

environment     the launcher's environment: rank, world size, meeting point, nodes (no torch)
cores           how many cores this process may use
devices         CPU or GPU, and the reason why not a GPU; peak rates of GPUs by name
gpu_settings    settings of torch, cuBLAS and NCCL before the first work on a GPU
groups          process groups, this rank's device, seeds, small collectives
single_process  groups of one process without other ranks
release         release of groups and engines when a training is over
launch          `--local-ranks N`: start the ranks of one machine and end them together
watch           the name of a rank that does not come to a collective; waiting for rank 0's work
idle            the file that an idle process waits for
signals         signals that ask for an end as flags for the loop
output          standard output and error that may go away
"""
