"""Files, locks and processes.

files     hashes, checked JSON, writes that are complete or absent
forms     strict JSON, and validation of what was read from it
home      paths that begin with ~, empty variables
lease     locks that are files with a heartbeat
limits    a lack of memory or threads, in a sentence
pool      worker processes
progress  progress on a terminal or in a log
words     control characters of a terminal, shown as escapes
"""
