"""Numbers and figures of docs/results again, from the tables beside them; texts of the studies.

figures        figures and numbers of the pages again, from what is committed
tables         the tables as they are committed
equal_cost     the modern study where what is saved buys tokens
scores         the modern study's ways to hold attention scores
recorded       figures of `evaluate` again, from their JSON
documentation  text of the study of frozen designs, from Debian packages by name
"""
