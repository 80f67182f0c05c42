"""Form of results on the terminal, in logs and in Markdown.

text        numbers and settings as short text; perplexity; mean and deviation of a few values
tables      a table of text cells or of records, in Markdown and on the terminal
log_errors  the lines of a log that state an error
"""
