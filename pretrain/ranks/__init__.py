"""Who runs: this process's place among the ranks, how ranks are started, how they are asked to stop.

groups   the launcher's environment, process groups, device, seeds, small collectives
launch   `--local-ranks N`: start the ranks of one machine and end them together
signals  SIGTERM, SIGUSR1 and Ctrl-C become flags that the loop reads; the states of a run
"""
