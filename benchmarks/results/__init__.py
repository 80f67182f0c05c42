"""The pages of docs/results: `python -m benchmarks.results`.

pages          the runs of each page, and its reports
figures        figures and numbers of the pages again, from what is committed
recorded       figures of `evaluate` and `ladder` again, from their JSON
documentation  text of the study of frozen designs, from Debian packages by name
"""
