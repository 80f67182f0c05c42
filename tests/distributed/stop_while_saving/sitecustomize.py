"""For a test, through PYTHONPATH: a rank stops itself (SIGSTOP) in the middle of saving a checkpoint.

When Python opens the temporary checkpoint.json in the directory named by STOP_WHILE_SAVING, every rank's file
is there and the COMPLETE marker is not. Whoever then kills the run kills it during a
save, however fast the disk is.
"""

import os
import signal
import sys


def stop_while_saving(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        path = arguments[0]
        if os.environ["STOP_WHILE_SAVING"] in path and "/checkpoint.json." in path:  # a temporary name
            os.kill(os.getpid(), signal.SIGSTOP)


sys.addaudithook(stop_while_saving)
