"""Text to samples, measured.

tokenizing   the command: tokenising beside its peers, and the table
contestants  those that take part, each in a process of its own
corpus_text  the text
samples      opening, the order of samples, and reading them
"""
