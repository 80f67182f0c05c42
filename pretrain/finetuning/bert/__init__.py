"""Head-wise test on BERT: queries and keys of a pretrained model are replaced and frozen.

experiment   fine-tunings of all arms in pairs of seeds
report       accuracies, paired differences, norms
arms         conditions and layers
surgery      replacement of queries and keys, head by head
directory    a BERT as Hugging Face stores it
"""
