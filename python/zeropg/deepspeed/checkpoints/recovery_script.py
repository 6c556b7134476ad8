#!/usr/bin/env python3
"""Writes the fp32 weights of the checkpoint beside this file: python zero_to_fp32.py . output_dir

zeropg puts it there, as DeepSpeed puts its own. It takes the arguments of that one: --help lists them.
"""

import importlib.util
import subprocess
import sys


def main() -> int:
    """Run `python -m zeropg zero_to_fp32` with this process's arguments; returns its exit status."""
    if importlib.util.find_spec("zeropg") is None:
        print(
            f"zero_to_fp32.py: zeropg, which wrote this checkpoint, is not installed for {sys.executable}. Install its "
            "wheel and torch, with pip, or start this script with the Python that trained; it needs neither a GPU nor "
            "the model",
            file=sys.stderr,
        )
        return 1
    return subprocess.call([sys.executable, "-m", "zeropg", "zero_to_fp32", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
