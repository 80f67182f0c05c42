"""The pages of docs/results: `python -m benchmarks.results`.

pages  the runs of each page, and its reports
"""
