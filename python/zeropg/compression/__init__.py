"""Gradients in fewer bytes between ranks: codecs, and how DDP and FSDP2 use them.

A codec is an argument: `zeropg.fully_shard(model, compression=BlockQuant(4))`, `ddp.register_comm_hook(
State(BlockQuant(4)), ddp_hook)`, `fsdp_module.set_custom_reduce_scatter(Fsdp2ReduceScatter(BlockQuant(4)))`, and
`all_reduce(tensor, BlockQuant(4))` in loops of your own. Nothing else is ever compressed: no losses, metrics,
broadcasts. fp32, fp16 and bf16 tensors on the CPU, on groups of zeropg.

With error feedback (the default) what an encoding loses is added to the next gradient of the same parameter. Each rank
keeps up to 4 bytes per element for it, which belong into checkpoints (`zeropg.save_checkpoint`, `State.state_dict`). A
step that is skipped loses what its gradient carried of earlier residuals; after a change of the loss scale call
`residuals.scale(new / old)`. A NaN or infinity anywhere makes the result NaN there, on every rank.
"""

from zeropg.compression.all_reduce import all_reduce
from zeropg.compression.codec import CLASSES, Codec
from zeropg.compression.ddp import ddp_hook
from zeropg.compression.fsdp2 import Fsdp2ReduceScatter
from zeropg.compression.plan import Plan
from zeropg.compression.state import State

globals().update(CLASSES)
__all__ = ["Codec", "Fsdp2ReduceScatter", "Plan", "State", "all_reduce", "ddp_hook", *CLASSES]
