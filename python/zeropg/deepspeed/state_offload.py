"""`engine.offload_states`: what an engine keeps between steps, in host memory until `engine.reload_states`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from zeropg.optim.shard_optimizer import ShardedOptimizer

LOGGER = logging.getLogger("zeropg")


class OffloadStateTypeEnum(str, Enum):
    """DeepSpeed's names of what can be offloaded."""

    optim_states = "optim_states"
    hp_params = "hp_params"  # masters that are apart from the parameters
    lp_params = "lp_params"  # what the model computes with
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"  # memory for reductions, which is freed


class OffloadDeviceEnum(str, Enum):
    """DeepSpeed's names of where to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


_OF_CORE = {
    OffloadStateTypeEnum.hp_params: "masters",
    OffloadStateTypeEnum.lp_params: "parameters",
    OffloadStateTypeEnum.lp_grads: "gradients",
    OffloadStateTypeEnum.contiguous_grad_buffer: "buffers",
}
States = frozenset[OffloadStateTypeEnum]


class StateOffload:
    """What of one engine is away. `moves`: whether to other memory: not where the host's is what computes."""

    def __init__(self, core: Any, optimizer: torch.optim.Optimizer | None, *, moves: bool) -> None:
        assert optimizer is None or isinstance(optimizer, ShardedOptimizer)  # `initialize` has made it
        self._core = core
        self._optimizer = optimizer
        self._moves = moves
        self._has_said = False
        self.away: States = frozenset()

    def offload(self, states: States, *, pin_memory: bool, non_blocking: bool) -> None:
        """Collective. RuntimeError, before anything is moved, where gradients cannot be."""
        new = states - self.away
        if not self._moves and not self._has_said and dist.get_rank() == 0:
            self._has_said = True
            LOGGER.warning(
                "[zeropg] offload_states: the model computes in host memory, where its states are already: nothing "
                "moves, and no memory is freed. Steps wait for reload_states all the same"
            )
        names = [name for state, name in _OF_CORE.items() if state in new]
        self._core.offload_states(names, moves=self._moves, pin_memory=pin_memory, non_blocking=non_blocking)
        self.away |= new
        if self._moves and self._optimizer is not None:
            is_moved = OffloadStateTypeEnum.optim_states in new
            pinned = pin_memory and torch.cuda.is_available()

            def to_host(values: torch.Tensor) -> torch.Tensor:
                host = torch.empty_like(values, device="cpu", pin_memory=pinned)
                return host.copy_(values, non_blocking=non_blocking)

            self._optimizer.move_state(to_host if is_moved else _stay)

    def reload(self, device: torch.device, *, non_blocking: bool) -> None:
        """Brings all back that is away."""
        away, self.away = self.away, frozenset()
        self._core.reload_states(non_blocking)
        if self._moves and away and self._optimizer is not None:

            def to_device(values: torch.Tensor) -> torch.Tensor:
                return torch.empty_like(values, device=device).copy_(values, non_blocking=non_blocking)

            self._optimizer.move_state(to_device if OffloadStateTypeEnum.optim_states in away else _stay)

    def check_loaded(self, operation: str) -> None:
        """Raises RuntimeError where something is away that an update needs."""
        self._core.check_loaded(operation)
        if OffloadStateTypeEnum.optim_states in self.away:
            raise RuntimeError(
                f"[zeropg rank {self._core.rank}/{self._core.world_size}] {operation}: optimizer states are offloaded "
                "(engine.offload_states); expected them to be back: call engine.reload_states() first."
            )


def states_of(include: Iterable[str] | None) -> States:
    """Returns what `include` names; None: everything. Raises ValueError for what is no state."""
    if include is None:
        return frozenset(OffloadStateTypeEnum)
    names = [include] if isinstance(include, str) else list(include)
    known = [state.value for state in OffloadStateTypeEnum]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"[zeropg] offload_states: include has {', '.join(map(repr, unknown))}; expected some of {', '.join(known)}"
        )
    return frozenset(map(OffloadStateTypeEnum, names))


def is_to_host(device: str | torch.device) -> bool:
    """Whether a device names host memory; False for none. Raises ValueError for another."""
    name = device.value if isinstance(device, OffloadDeviceEnum) else str(device)
    if name not in ("cpu", "none"):
        raise ValueError(
            f"[zeropg] offload_states: device is {name!r}, expected 'cpu'. For state on a disk configure "
            "zero_optimization.offload_optimizer"
        )
    return name == "cpu"


def _stay(values: torch.Tensor) -> torch.Tensor:
    return values
