"""Numbers of docs/results again, from the tables beside them; texts of the studies.

numbers        numbers of the reports again, from what is committed
records        a small record of every run that a page counts; held against seals
stated         numbers with intervals that pages state, again from the runs
tables         the tables as they are committed
equal_cost     the modern study where what is saved buys tokens
scores         the modern study's ways to hold attention scores
documentation  texts of the studies, from Debian packages by version
"""
