"""The pages of docs/results: `python -m benchmarks.results`.

page           what a page is: runs of shipped grids, and reports of them
pages          all pages
modern_pages   those of the modern study
figures        figures and numbers of the pages again, from what is committed
equal_cost     the modern study where what is saved buys tokens
scores         the modern study's ways to hold attention scores
recorded       figures of `evaluate` again, from its JSON
documentation  text of the study of frozen designs, from Debian packages by name
"""
