"""The preflight `python -m pretrain doctor` on every rank: is every node fit for this run?

rank         the course of the preflight on one rank, and its report
request      what the command line asks for; imports nothing heavy
rendezvous   a key-value store with time limits, so that a missing rank has a name
checks       config, data, versions, GPUs, disk, /dev/shm; all-reduces within a node, over all ranks
verdict      problems, each with its nodes, from the facts of all ranks (pure)
"""
