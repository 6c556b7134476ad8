"""A training step of a small GPT, as DDP and FSDP2 make it over a given group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.tools.train.gpt import GPT, GPTConfig

_SHAPE = GPTConfig(layers=4, width=256, heads=4, context=128)
WEIGHT_BYTES = 12_900_352  # of _SHAPE in fp32


def _ddp(model: Any, group: dist.ProcessGroup) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def _fsdp2(model: Any, group: dist.ProcessGroup) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    whole: nn.Module = model
    return whole


STEPS: dict[str, Callable[[Any, dist.ProcessGroup], nn.Module]] = {"ddp_step": _ddp, "fsdp2_step": _fsdp2}


class Step:
    """One sequence per rank, the same in every step. Called by all ranks; `loss` is this rank's last one."""

    def __init__(self, kind: str, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        self._model = STEPS[kind](GPT(_SHAPE), group)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self._tokens = torch.randint(256, (1, _SHAPE.context + 1), generator=generator)
        self.loss = float("nan")

    def __call__(self) -> None:
        logits = self._model(self._tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss = loss.item()
