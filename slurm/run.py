"""Run a module of the code beside this directory: `python slurm/run.py -m pretrain train …`.

Like `python -m`, but from any working directory and whatever packages lie in it: a job works in the
checkout and runs a copy of its code (slurm/pin.sh).
"""

import os
import runpy
import sys

if __name__ == "__main__":
    code = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not getattr(sys.flags, "safe_path", False):  # then Python has put slurm/ first
        del sys.path[0]
    sys.path.insert(0, code)
    module = sys.argv[2]
    sys.argv[1:3] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)
