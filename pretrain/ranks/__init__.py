"""Who runs, and where: this process's place among the ranks, how ranks are started and asked to stop.

environment  what the launcher says: rank, world size, meeting point, nodes (no torch)
devices      CPU or GPU, and why not
peak_flops   peak arithmetic rates of GPUs by name (no torch)
gpu_settings what torch, cuBLAS and NCCL are told first
groups       process groups, this rank's device, seeds, small collectives
launch       `--local-ranks N`: start the ranks of one machine and end them together
watch        which rank did not come to a collective
signals      SIGTERM, SIGUSR1 and Ctrl-C become flags that the loop reads
"""
