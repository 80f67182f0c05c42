"""The pages of docs/results: `python -m benchmarks.results`.

pages          the runs of each page, and its reports
documentation  text of the study of frozen designs, from Debian packages by name
"""
