"""Averages of a sharded model's weights, as shards: `ema`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zeropg.checkpoint.state_dict import full_state_dict
from zeropg.optim.normal_tensors import normal_tensors
from zeropg.rank_io.agreement import check_same, together
from zeropg.sharding.access import Shard, local_shards, writable_shards
from zeropg.sharding.state import state_of

# How far from the weights' the averages' autograd versions are: further than writes in place ever move a version.
_AVERAGES_VERSION = 1 << 30


def ema(model: nn.Module, decay: float = 0.999) -> WeightAverage:
    """Returns an exponential average of a sharded model's weights. All ranks must call.

    It does what torch.optim.swa_utils.AveragedModel does with get_ema_multi_avg_fn(decay), which cannot copy a sharded
    model. Each rank averages the masters that it owns: in every stage 1/world_size of the parameters, in the masters'
    dtype. Parameters of `fully_shard(ignored_params=...)`, which each rank has whole, it averages whole.

        average = zeropg.ema(model, 0.999)
        for batch in batches:
            ...
            optimizer.step()
            average.update()
        with average.average_parameters():
            evaluate(model)

    Raises ValueError for a model that is not sharded, a decay outside of [0, 1] and, on every rank, decays that differ.
    """
    return WeightAverage(model, decay)


class WeightAverage:
    """Averaged weights beside a sharded model's own; `ema` makes it. All ranks must call every method alike.

    A model may have several. While it has the weights of one, no method of any can be called.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"[zeropg] ema: decay is {decay}; expected a number in [0, 1].")
        self.decay = decay
        self._model = model
        self._state = state_of(model, "ema")
        self._core = self._state.core
        self._updates = 0
        self._state.check_has_own_weights("ema")
        group = self._state.parallel.everybody
        check_same(group, "ema", together(group, "ema", lambda: {"decay": str(decay)}))
        self._state.settle_writes("ema")
        with normal_tensors():
            self._averages = [tensor.clone() for tensor in self._own(local_shards(model))]

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the weights: averages = decay * averages + (1 - decay) * weights. The first call
        copies the weights instead."""
        self._state.check_has_own_weights("ema.update")
        self._state.settle_writes("ema.update")
        weight = 1.0 - self.decay if self._updates else 1.0
        for index, tensor in enumerate(self._own(local_shards(self._model))):
            # The masters of what was frozen have another dtype once it is trainable.
            average = self._averages[index].to(tensor.dtype)
            # Weights of 8 bits have no arithmetic, and are frozen.
            self._averages[index] = average.copy_(tensor) if tensor.itemsize == 1 else average.lerp_(tensor, weight)
        self._updates += 1

    @contextlib.contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Gives the model the averaged weights inside the `with`, to evaluate, export or save it; afterwards it has its
        own again, to the bit. A write to parameters inside is a write to the averages. Buffers stay the model's.

        Inside, an optimizer's step and load_checkpoint raise RuntimeError. So does a backward whose forward was not in
        the same `with`: inside over a graph from outside, and the other way round."""
        self._state.check_has_own_weights("ema.average_parameters")
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self, *, rank0_only: bool = True) -> dict[str, Any]:
        """Returns what `load_state_dict` takes at any world size and stage, e.g. for save_checkpoint(extra=...).

        It holds the averages as whole tensors on the CPU, under the model's names, and the number of updates.

        rank0_only: True: all ranks but rank 0 of the group get no tensors.
        """
        self._state.check_has_own_weights("ema.state_dict")
        with self.average_parameters():
            values = full_state_dict(self._model, rank0_only=rank0_only)
        return {"updates": self._updates, "parameters": {name: values[name] for name in self._names() if values}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the averages. Raises ValueError, on every rank, for other parameters or shapes than the model's."""
        self._state.check_has_own_weights("ema.load_state_dict")
        values = state_dict["parameters"]

        def check() -> None:
            if differing := sorted(values.keys() ^ set(self._names())):
                raise ValueError(
                    f"[zeropg] ema.load_state_dict: {', '.join(map(repr, differing[:3]))} are in the state or in the "
                    "model, not in both; expected the averages of this model, on every rank."
                )
            for name, parameter in self._parameters():
                if values[name].shape != parameter.shape:
                    raise ValueError(
                        f"[zeropg] ema.load_state_dict: {name!r} has shape {list(values[name].shape)}, expected "
                        f"{list(parameter.shape)}."
                    )

        together(self._state.parallel.everybody, "ema.load_state_dict", check)
        with self.average_parameters():
            self._model.load_state_dict(values, strict=False)
        self._updates = int(state_dict["updates"])

    def _swap(self) -> None:
        """Exchanges weights and averages on all ranks, or, with an error, on none. Collective."""
        is_done = False

        def exchange(tensors: list[torch.Tensor]) -> None:
            nonlocal is_done
            _exchange(tensors, self._averages)
            is_done = True

        with normal_tensors(), writable_shards(self._model) as shards:
            own = list(self._own(shards))
            try:
                together(self._state.parallel.everybody, "ema", lambda: exchange(own))
            except BaseException:
                if is_done:
                    _exchange(own, self._averages)
                raise
            self._state.has_average = not self._state.has_average
        self._move_versions(_AVERAGES_VERSION if self._state.has_average else -_AVERAGES_VERSION)

    def _move_versions(self, by: int) -> None:
        """Makes autograd refuse a backward over other weights than those of its forward."""
        parameters = tuple(p for p in self._model.parameters() if p.is_floating_point() and not p.is_inference())
        torch._C._autograd._unsafe_set_version_counter(parameters, tuple(p._version + by for p in parameters))

    def _names(self) -> list[str]:
        return [name for name, _ in self._parameters()]

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for flat in self._core.flat_groups:
            yield from ((names[0], p) for names, p, *_ in flat.slots if p.is_floating_point())
        names = {id(p): name for name, p in self._model.named_parameters()}
        yield from ((names[id(p)], p) for p in self._ignored())

    def _own(self, shards: Iterable[Shard]) -> Iterator[torch.Tensor]:
        yield from (tensor for _, tensor, *_ in shards if tensor.is_floating_point())
        yield from (parameter.detach() for parameter in self._ignored())

    def _ignored(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self._state.ignored_parameters() if parameter.is_floating_point())


def _exchange(tensors: list[torch.Tensor], averages: list[torch.Tensor]) -> None:
    """Gives each tensor its average's value, and the average the tensor's. Undoes all where it is interrupted."""
    before: torch.Tensor | None = None
    index = 0
    try:
        for index, tensor in enumerate(tensors):
            before = None
            before = tensor.clone()
            tensor.copy_(averages[index])
            averages[index] = before
    except BaseException:
        if before is not None and averages[index] is not before:
            tensors[index].copy_(before)
        done = index + 1 if before is not None and averages[index] is before else index
        _exchange(tensors[:done], averages)
        raise
