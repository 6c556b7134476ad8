"""Optimizers whose momentum travels in few bits, and torch's over sharded models.

`OneBitAdam`, `OneBitLamb` and `DGC` train as DistributedDataParallel (`optimizer.attach(ddp)`) or under
`fully_shard(stage=0 or 1)` (`zeropg.shard_optimizer`), on the CPU, over groups of zeropg.
"""

from zeropg.optim.dgc import DGC
from zeropg.optim.lion import Lion
from zeropg.optim.one_bit_adam import OneBitAdam
from zeropg.optim.one_bit_lamb import OneBitLamb

__all__ = ["DGC", "Lion", "OneBitAdam", "OneBitLamb"]
