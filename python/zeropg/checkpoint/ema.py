"""Averages of a sharded model's weights, as shards: `ema`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zeropg.checkpoint.state_dict import full_state_dict
from zeropg.rank_io.agreement import together
from zeropg.sharding.access import local_shards, writable_shards
from zeropg.sharding.state import state_of


def ema(model: nn.Module, decay: float = 0.999) -> WeightAverage:
    """Returns an exponential average of a sharded model's weights. All ranks must call.

    It does what torch.optim.swa_utils.AveragedModel does with get_ema_multi_avg_fn(decay), which cannot copy a sharded
    model. Each rank averages the masters that it owns: in every stage 1/world_size of the parameters, in the masters'
    dtype.

        average = zeropg.ema(model, 0.999)
        for batch in batches:
            ...
            optimizer.step()
            average.update()
        with average.average_parameters():
            evaluate(model)

    Raises ValueError for a model that is not sharded and a decay outside of [0, 1].
    """
    return WeightAverage(model, decay)


class WeightAverage:
    """Averaged weights beside a sharded model's own; `ema` makes it. All ranks must call every method alike."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"[zeropg] ema: decay is {decay}; expected a number in [0, 1].")
        self.decay = decay
        self._model = model
        self._core = state_of(model, "ema").core
        self._updates = 0
        self._is_swapped = False
        self._core.settle_writes("ema")
        self._averages = [tensor.clone() for tensor in self._own(local_shards(model))]

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the weights: averages = decay * averages + (1 - decay) * weights. The first call
        copies the weights instead."""
        self._check_not_swapped("update")
        self._core.settle_writes("ema.update")
        weight = 1.0 - self.decay if self._updates else 1.0
        for index, tensor in enumerate(self._own(local_shards(self._model))):
            # The masters of what was frozen have another dtype once it is trainable.
            self._averages[index] = self._averages[index].to(tensor.dtype).lerp_(tensor, weight)
        self._updates += 1

    @contextlib.contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Gives the model the averaged weights inside the `with`, to evaluate, export or save it; afterwards it has its
        own again, to the bit. A write to parameters inside is a write to the averages. Buffers stay the model's."""
        self._check_not_swapped("average_parameters")
        self._swap()
        self._is_swapped = True
        try:
            yield
        finally:
            self._swap()
            self._is_swapped = False

    def state_dict(self, *, rank0_only: bool = True) -> dict[str, Any]:
        """Returns what `load_state_dict` takes at any world size and stage, e.g. for save_checkpoint(extra=...).

        It holds the averages as whole tensors on the CPU, under the model's names, and the number of updates.

        rank0_only: True: all ranks but rank 0 of the group get no tensors.
        """
        self._check_not_swapped("state_dict")
        with self.average_parameters():
            values = full_state_dict(self._model, rank0_only=rank0_only)
        return {"updates": self._updates, "parameters": {name: values[name] for name in self._names() if values}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the averages. Raises ValueError, on every rank, for other parameters than the model's."""
        self._check_not_swapped("load_state_dict")
        values = state_dict["parameters"]

        def check() -> None:
            if differing := sorted(values.keys() ^ set(self._names())):
                raise ValueError(
                    f"[zeropg] ema.load_state_dict: {', '.join(map(repr, differing[:3]))} are in the state or in the "
                    "model, not in both; expected the averages of this model, on every rank."
                )

        together(self._core.process_group, "ema.load_state_dict", check)
        with self.average_parameters():
            self._model.load_state_dict(values, strict=False)
        self._updates = state_dict["updates"]

    def _swap(self) -> None:
        with torch.no_grad(), writable_shards(self._model) as shards:
            for index, tensor in enumerate(self._own(shards)):
                before = tensor.clone()
                tensor.copy_(self._averages[index])
                self._averages[index] = before

    def _names(self) -> list[str]:
        slots = (slot for flat in self._core.flat_groups for slot in flat.slots)
        return [names[0] for names, parameter, *_ in slots if parameter.is_floating_point()]

    @staticmethod
    def _own(shards: Any) -> Iterator[torch.Tensor]:
        return (tensor for _, tensor, *_ in shards if tensor.is_floating_point())

    def _check_not_swapped(self, operation: str) -> None:
        if self._is_swapped:
            raise RuntimeError(
                f"[zeropg] ema.{operation}: called inside average_parameters, where the model has the averages; call "
                "it after the `with`."
            )
