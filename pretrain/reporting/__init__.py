"""Form of results, the same for every verb: `compare`, `evaluate`, `sweep`, and a job's log.

text         numbers and settings as short text; perplexity; mean and deviation of a few values
tables       a table of text cells or of records, in Markdown and on the terminal
html         a page in one file: page.css, page.js, tables, texts, drawings
plots        the style of all plots, and how they are written
progress     progress of an evaluation, on the terminal or in a log
log_errors   the lines of a log that say what went wrong
"""
