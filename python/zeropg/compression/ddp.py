"""Compressed gradients under DistributedDataParallel."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, GradBucket
from torch.futures import Future, collect_all

from zeropg.compression.state import State


def ddp_hook(state: State, bucket: GradBucket) -> Future[torch.Tensor]:
    """The communication hook: `ddp.register_comm_hook(State(BlockQuant(4)), ddp_hook)`. Collective, in backward.

    Two phases, both encoded: every rank sends each shard of the bucket to its owner, which adds them in fp32 and sends
    the average back. All ranks get the same bits. Gradients that the state's plan does not encode are averaged as they
    are. Raises TypeError for gradients that are not fp32, fp16 or bf16 on the CPU.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"[zeropg] ddp_hook: the state is {state!r}; register it as ddp.register_comm_hook(State(codec), ddp_hook)."
        )
    state.begin_bucket()
    return _reduce(state, bucket.buffer(), bucket.parameters())


def _reduce(state: State, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Future[torch.Tensor]:
    encoded = [state.encodes(parameter) for parameter in parameters]
    numel = sum(p.numel() for p, is_encoded in zip(parameters, encoded, strict=True) if is_encoded)
    if state.codec_of(numel) is None:  # not of so few
        encoded = [False] * len(encoded)
    if all(encoded):
        future: Future[list[torch.Tensor]] = state.all_reduce(buffer, parameters).get_future()
        return future.then(lambda done: done.value()[0])
    parts = buffer.split([parameter.numel() for parameter in parameters])
    rest = [index for index, is_encoded in enumerate(encoded) if not is_encoded]
    state.pay_plain([parts[index] for index in rest], [parameters[index] for index in rest])
    if not any(encoded):
        return _average([buffer], state.backend).then(lambda done: (done.wait(), buffer)[1])
    plain = _average([parts[index] for index in rest], state.backend)
    chosen = [index for index, is_encoded in enumerate(encoded) if is_encoded]
    # One call for all of them: a codec that selects chooses among all, and links see one message.
    flat = torch.cat([parts[index] for index in chosen])
    work = state.all_reduce(flat, [parameters[index] for index in chosen])

    def put_back(done: Future[list[Future[Any]]]) -> torch.Tensor:
        for each in done.value():
            each.wait()  # raises what went wrong
        torch._foreach_copy_([parts[index] for index in chosen], flat.split([parts[index].numel() for index in chosen]))
        return buffer

    return collect_all([plain, work.get_future()]).then(put_back)


def _average(tensors: Sequence[torch.Tensor], backend: Any) -> Future[Any]:
    """Averages tensors of one dtype over the ranks as they are, in place."""
    flat = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    future: Future[Any] = backend.allreduce([flat], options).get_future()
    if len(tensors) == 1:
        return future

    def put_back(done: Future[Any]) -> None:
        done.wait()
        torch._foreach_copy_(list(tensors), flat.split([tensor.numel() for tensor in tensors]))

    return future.then(put_back)
