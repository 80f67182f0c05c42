"""Files, locks and processes.

files     hashes, checked JSON, writes that are complete or absent
lease     locks that are files with a heartbeat
pool      worker processes
progress  progress on a terminal or in a log
"""
