"""Binds this process to CPUs and becomes the command of a rank: bind.py CPUS;CPUS;... COMMAND...

torchrun gives all ranks of a host the same command; LOCAL_RANK says which list of CPUs is this rank's. Run as a file,
without importing zeropg, so that the rank finds a process as new as ever.
"""

import os
import sys

if __name__ == "__main__":
    cpus = sys.argv[1].split(";")[int(os.environ["LOCAL_RANK"])]
    os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    os.execvp(sys.argv[2], sys.argv[2:])
