"""The head-wise test on BERT: is a pretrained model that loses its queries and keys a reservoir?

verbs        `evaluate bert-reservoir` and `evaluate bert-small`
surgery      what replaces queries and keys, head by head
directory    a BERT as Hugging Face stores it
experiment   fine-tunings of all arms in pairs of seeds, resumable, each with its proof of what stayed frozen
report       accuracies, paired differences, norms
small        a small BERT from one's own text
sentences    that text's sentences, and which source each is from
"""
