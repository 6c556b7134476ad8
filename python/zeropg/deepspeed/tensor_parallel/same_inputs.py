"""Ranks that share layers compute with the same inputs: checked in every forward."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from zeropg.rank_io.agreement import collective_device, peers_needed
from zeropg.sharding.nested import hidden_tensors_in, tensors_in


class SameInputs:
    """Compares what the ranks of a group give a model. The group is that of ranks that share its layers."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._dropouts = [module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]

    def check(self, inputs: Iterable[object]) -> None:
        """Raises ValueError on all ranks of the group where inputs differ, or the random numbers of dropout would.

        Collective: one gather of 16 bytes. Reads the inputs, on a device too.
        """
        own = torch.tensor([_digest(inputs), self._random_state()], device=collective_device(self._group))
        everybodys = [torch.empty_like(own) for _ in range(self._group.size())]
        with peers_needed(self._group, "forward"):
            dist.all_gather(everybodys, own, group=self._group)
        digests, states = torch.stack(everybodys).T.tolist()
        if len(set(digests)) > 1:
            raise self._unlike("inputs", "give them one batch: samplers go by engine.get_data_parallel_rank()")
        if len(set(states)) > 1:
            seeds = "torch.manual_seed(seed + engine.get_data_parallel_rank())"
            raise self._unlike("random numbers for dropout", f"seed them alike: {seeds}")

    def _random_state(self) -> int:
        if not any(module.training and module.p > 0 for module in self._dropouts):
            return 0
        is_on_device = collective_device(self._group).type == "cuda"
        state = torch.cuda.get_rng_state() if is_on_device else torch.get_rng_state()
        return zlib.crc32(state.numpy().tobytes())

    def _unlike(self, what: str, remedy: str) -> ValueError:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(self._group)))
        return ValueError(
            f"[zeropg rank {dist.get_rank()}/{dist.get_world_size()}] forward: ranks {ranks} share the model's layers "
            f"(tensor_parallel.autotp_size), and have other {what}; {remedy}"
        )


def _digest(inputs: Iterable[object]) -> int:
    digest = 0
    given = list(inputs)
    for tensor in [*tensors_in(given), *hidden_tensors_in(given)]:
        digest = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest)
        bytes_of = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest = zlib.crc32(bytes_of.numpy().tobytes(), digest)
    return digest
