"""Files, locks and processes.

files     hashes, checked JSON, writes that are complete or absent
forms     JSON as its standard has it, and the forms of what is read from it
home      paths that begin with ~
lease     locks that are files with a heartbeat
pool      worker processes
progress  progress on a terminal or in a log
words     what a terminal would obey, shown as escapes
"""
