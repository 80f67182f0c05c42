"""Programs for the people who work on this repository; nothing in the packages imports them.

count_code        how much code there is, without blank lines, comments and docstrings
"""
