"""Ranks that share layers compute with the same inputs: checked in every forward of a training step."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from zeropg.rank_io.agreement import gather_rows, peers_needed
from zeropg.sharding.nested import hidden_tensors_in, tensors_in


class SameInputs:
    """Compares what the ranks of each group that shares layers give a model."""

    def __init__(
        self, model: nn.Module, everybody: dist.ProcessGroup, sharing: dist.ProcessGroup, device: torch.device
    ) -> None:
        """everybody: all ranks of the model. sharing: those that share this one's layers. device: of the model."""
        self._everybody, self._device = everybody, device
        self._row = dist.get_process_group_ranks(sharing)
        self._dropouts = [module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]

    def check(self, inputs: Iterable[object]) -> None:
        """Raises ValueError on every rank where inputs of a group differ, or the random numbers of dropout would.

        Collective: one gather of 24 bytes. Reads the inputs: on a device that waits for them.
        """
        mine = [self._row[0], _digest(inputs), self._random_state()]
        with peers_needed(self._everybody, "forward"):
            gathered = gather_rows(self._everybody, torch.tensor(mine))
        rows: dict[int, list[list[int]]] = {}
        for first, *values in gathered.tolist():
            rows.setdefault(first, []).append(values)
        for first, values in rows.items():
            digests, states = zip(*values, strict=True)
            if len(set(digests)) > 1:
                raise self._unlike(
                    first, "inputs", "give them one batch: samplers go by engine.get_data_parallel_rank()"
                )
            if len(set(states)) > 1:
                seeds = "torch.manual_seed(seed + engine.get_data_parallel_rank())"
                raise self._unlike(first, "random numbers for dropout", f"seed them alike: {seeds}")

    def _random_state(self) -> int:
        if not any(module.training and module.p > 0 for module in self._dropouts):
            return 0
        is_cuda = self._device.type == "cuda"
        state = torch.cuda.get_rng_state(self._device) if is_cuda else torch.get_rng_state()
        return zlib.crc32(state.numpy().tobytes())

    def _unlike(self, first: int, what: str, remedy: str) -> ValueError:
        ranks = ", ".join(str(first + place) for place in range(len(self._row)))
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
