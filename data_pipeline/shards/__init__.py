"""Shard directories: their format, their checks, and the samples read from them.

manifest          manifest.json and the cheap check of a directory
writing           writer of Megatron .bin/.idx files
reading           readers: megatron-core's own, and a bounded pool of maps
mapping           memory maps that hold no descriptor
verify            thorough check of a directory
stats             table of counts, lengths of documents
documents         documents of a split as one address space
permutation       order of an epoch, and its cache on disk
samples           training and validation samples by number
blend             several directories and sources in given proportions
parts             parts of a blend, and checks that two of them share no text
proportions       order of a blend's members
blend_difference  differences between two descriptions of a blend
unigram           perplexity of the tokens' frequencies alone
loader            threads that read blocks ahead
"""
