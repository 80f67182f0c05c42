"""Form of reports, the same for every verb: `compare`, `evaluate`, `sweep`.

html      a page in one file: page.css, page.js, tables, texts, drawings
plots     the style of all plots, and how they are written
progress  progress of an evaluation, on the terminal or in a log
"""
