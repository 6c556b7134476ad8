"""What the fork server of `tests/spawn.py` imports last: what most tests need, once for all ranks.

The garbage collector then leaves alone what has been loaded until here: collections in ranks would copy its pages.
"""

import gc

import pytest  # noqa: F401

import zeropg  # noqa: F401

gc.collect()
gc.freeze()
