"""Files, locks and processes.

files     hashes, checked JSON, writes that are complete or absent
home      paths that begin with ~
lease     locks that are files with a heartbeat
pool      worker processes
progress  progress on a terminal or in a log
words     what a terminal would obey, shown as escapes
"""
