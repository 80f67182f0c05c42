"""Programs for the people who work on this repository; nothing in the packages imports them.

arithmetic        digest of how a machine rounds
count_code        how much code there is, without blank lines, comments and docstrings
faults            a campaign of random faults on real runs, `make faults`
made_corpus       a corpus that is the same on every machine
record            what must stay byte-equal: make a recording, compare with one
release           sdist and wheel as a newcomer has them, `make release-check`
"""
