"""The preflight: is every node fit for this run? `python -m pretrain doctor`, on every rank, before training.

meeting      where ranks meet: a store whose every wait ends, so that a missing rank can be named
request      what is asked
checks       what a rank finds out alone, one check after the other, each within its time
machine      ... of its node: versions, GPUs, disk, /dev/shm
bank         ... of the frozen bank: digests to compare
collectives  what ranks find out together: all-reduce within a node, with the head node, over all
verdict      from all ranks' facts to problems, each with the nodes it is about (pure)
report       the table for people, the JSON for the job script
rank         the course of it all on one rank
"""
