"""Becomes the command of a rank with --local_rank=N among its arguments: local_rank.py PLACE COMMAND...

torchrun gives all ranks of a host the same command. PLACE says before which of its words the argument comes. Run as a
file, as bind.py is.
"""

import os
import sys

if __name__ == "__main__":
    place, command = int(sys.argv[1]), sys.argv[2:]
    command.insert(place, f"--local_rank={os.environ['LOCAL_RANK']}")
    os.execvp(command[0], command)
