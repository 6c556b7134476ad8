"""Compressed reductions, slowly: what every rank must get, to the bit."""

from __future__ import annotations

import torch

from zeropg.compression import Codec

CONTRIBUTION, RESULT = 0, 1  # hops of residuals


class Reference:
    """All ranks of a group at once. `residuals[hop][rank]` are those of its whole input, zeros at first."""

    def __init__(self, codec: Codec, world_size: int, numel: int) -> None:
        self.codec = codec.make_compressor()
        self.has_residuals = codec.error_feedback
        self.residuals = [[torch.zeros(numel) for _ in range(world_size)] for _ in (CONTRIBUTION, RESULT)]

    def _through(self, values: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        encoded = self.codec.encode(values.clone(), residual if self.has_residuals else None)
        return self.codec.decode(encoded, values.numel())

    def _average(self, inputs: list[torch.Tensor], owner: int, start: int, stop: int) -> torch.Tensor:
        total = torch.zeros(stop - start)
        for rank, values in enumerate(inputs):
            part = values[start:stop]
            if rank != owner:
                part = self._through(part, self.residuals[CONTRIBUTION][rank][start:stop])
            total = part.clone() if rank == 0 else total + part
        return total / len(inputs)

    def reduce_scatter(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        block = inputs[0].numel() // len(inputs)
        return [self._average(inputs, owner, owner * block, (owner + 1) * block) for owner in range(len(inputs))]

    def all_reduce(self, inputs: list[torch.Tensor], quant_block: int) -> torch.Tensor:
        numel, world_size = inputs[0].numel(), len(inputs)
        share = -(-numel // world_size)
        share = -(-share // quant_block) * quant_block  # whole blocks
        result = torch.empty(numel)
        for owner in range(world_size):
            start, stop = min(numel, owner * share), min(numel, (owner + 1) * share)
            total = self._average(inputs, owner, start, stop)
            result[start:stop] = self._through(total, self.residuals[RESULT][owner][start:stop])
        return result
