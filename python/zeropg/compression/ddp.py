"""Compressed gradients under DistributedDataParallel."""

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from zeropg.compression.state import State


def ddp_hook(state: State, bucket: GradBucket) -> Future[torch.Tensor]:
    """The communication hook: `ddp.register_comm_hook(State(BlockQuant(4)), ddp_hook)`. Collective, in backward.

    Two phases, both encoded: every rank sends each shard of the bucket to its owner, which adds them in fp32 and sends
    the average back. All ranks get the same bits. Raises TypeError for gradients that are not fp32 on the CPU.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"[zeropg] ddp_hook: the state is {state!r}; register it as ddp.register_comm_hook(State(codec), ddp_hook)."
        )
    future: Future[list[torch.Tensor]] = state.all_reduce(bucket.buffer(), bucket.parameters()).get_future()
    return future.then(lambda done: done.value()[0])
