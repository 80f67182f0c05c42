"""Text to samples, measured.

tokenizing   the command: tokenising beside its peers, and the table
warm         what a tool costs beyond its start, in a process of its own
corpus_text  the text
samples      opening, the order of samples, and reading them
"""
