"""Optimizers that torch has not, and torch's over sharded models.

`Adam` and `AdamW` (torch's, with moments in 16 or 8 bits), `Adafactor`, `Lion`, `LAMB` and `Muon` train as they are, or
with `zeropg.shard_optimizer` in every stage.

`OneBitAdam`, `ZeroOneAdam`, `OneBitLamb` and `DGC` train as DistributedDataParallel (`optimizer.attach(ddp)`) or under
`fully_shard(stage=0 or 1)` (`zeropg.shard_optimizer`), on the CPU, over groups of zeropg.
"""

from zeropg.optim.adafactor import Adafactor
from zeropg.optim.adam import Adam, AdamW
from zeropg.optim.dgc import DGC
from zeropg.optim.lamb import LAMB
from zeropg.optim.lion import Lion
from zeropg.optim.muon import Muon
from zeropg.optim.one_bit_adam import OneBitAdam
from zeropg.optim.one_bit_lamb import OneBitLamb
from zeropg.optim.zero_one_adam import ZeroOneAdam

__all__ = ["DGC", "LAMB", "Adafactor", "Adam", "AdamW", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
