"""Text to samples, measured.

tokenizing   the command: tokenising beside its peers, and the table
warm         the cost of a tool beyond its start; alone, for an interpreter that has nothing else
corpus_text  the text
samples      opening, the order of samples, and reading them
"""
