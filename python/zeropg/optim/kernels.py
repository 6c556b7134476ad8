"""Which of zeropg's fused kernels steps a torch.optim.Optimizer: what the C++ registry says of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zeropg import optim
from zeropg._native import _C

Group = dict[str, Any]


# How state is kept in fewer bits than the master's; () where it is not.
Storage = tuple[tuple[str, torch.dtype, bool], ...]
# Options of a param group that say how an optimizer keeps its state, not what it computes: a load leaves them as the
# program has set them, and converts.
STORAGE_OPTIONS = ("state_bits",)


class Kernel:
    """One fused kernel, and what of a param group it reads."""

    def __init__(self, name: str):
        self.optimizer = _C.make_optimizer(name)
        self.name = self.optimizer.name
        self.counts_steps = self.optimizer.counts_steps
        self.torch_classes = self.optimizer.torch_classes
        self.torch_flags = self.optimizer.torch_flags
        typical = self.optimizer.hyperparameters
        self._hyperparameters = tuple(typical)
        self.typical_slots: list[_C.StateSlot] = self.optimizer.state_slots(typical)
        # Of the slots that are not in the master's dtype: name, dtype of an entry, and whether entries are elements.
        self.storage: Storage = tuple(
            (slot.name, dtype, slot.is_packed)
            for slot in self.typical_slots
            if (dtype := slot.dtype(torch.float32)) != torch.float32
        )

    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Returns what `group` says of them; torch's `betas` are `beta1` and `beta2`."""
        values = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False)) | dict(group)
        return {key: number(values[key]) for key in self._hyperparameters}

    def check(self, hyperparameters: dict[str, float]) -> None:
        """Raises ValueError for what no step takes: by a step of one element."""
        self.optimizer.step(
            torch.zeros(1, dtype=torch.float32),
            torch.zeros(1, dtype=torch.float32),
            [new_state(slot, 1, torch.float32) for slot in self.optimizer.state_slots(hyperparameters)],
            None,
            range=(0, 1),
            hyperparameters=hyperparameters,
            step=1,
            gradient_factor=1.0,
        )

    def going_on(self, hyperparameters: dict[str, float]) -> dict[str, float]:
        """The same for a first step over state that is there already: see `Hyperparameter` in optimizer.h."""
        return {key: 0.0 if key.startswith("initial_") else value for key, value in hyperparameters.items()}


class Kernels:
    """The kernels that may step one optimizer: a param group's flags choose, and where it lacks one, the default's."""

    def __init__(self, choices: Sequence[Kernel], default: Kernel, *, foreign: Iterable[str] = ()):
        """foreign: options that the class lacks; a param group may have them from another class's state dict."""
        self._choices = choices
        self._foreign = frozenset(foreign)
        self.default = default
        slots = [slot for kernel in choices for slot in kernel.typical_slots]
        # By name: what may be packed is so in one way.
        self.packed_slots: dict[str, _C.StateSlot] = {slot.name: slot for slot in slots if slot.is_packed}

    def of(self, options: Mapping[str, Any]) -> Kernel:
        """Returns the kernel for a param group, or for an optimizer's defaults."""
        own = {key: value for key, value in options.items() if key not in self._foreign}
        flags = {key: int(own.get(key, value)) for key, value in self.default.torch_flags.items()}
        return next((kernel for kernel in self._choices if kernel.torch_flags == flags), self.default)


def kernels_for(optimizer: torch.optim.Optimizer) -> Kernels | None:
    """Returns the kernels for an optimizer whose class they name, None where there are none."""
    name = next((name for name, kind in FUSED.items() if kind is type(optimizer)), None)
    if name is None:
        return None
    choices = [kernel for kernel in _KERNELS if name in kernel.torch_classes]
    by_class = Kernels(choices, next(kernel for kernel in choices if kernel.torch_classes[0] == name))
    foreign = [key for key in STORAGE_OPTIONS if key not in optimizer.defaults]
    return Kernels(choices, by_class.of(optimizer.defaults), foreign=foreign)


def kernel_of(name: str, options: Mapping[str, Any]) -> Kernel:
    """Returns the kernel that steps the class `name` with the options of a param group."""
    choices = [kernel for kernel in _KERNELS if name in kernel.torch_classes]
    return Kernels(choices, choices[0]).of(options)


def new_state(slot: _C.StateSlot, numel: int, master: torch.dtype) -> torch.Tensor:
    """The tensor of a slot before the first step of `numel` elements."""
    return torch.zeros(slot.entries(numel), dtype=slot.dtype(master))


def number(value: Any) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def class_of(name: str) -> type[torch.optim.Optimizer] | None:
    """Returns the class that a kernel calls so: torch.optim's, or else zeropg.optim's; None where there is none."""
    own = name.removeprefix("zeropg.optim.")
    return (getattr(torch.optim, name, None) if own == name else None) or getattr(optim, own, None)


def fused_classes(kernels: Iterable[Kernel]) -> dict[str, type[torch.optim.Optimizer]]:
    """Returns, by their names, the classes that a kernel is by their defaults."""
    names = [name for kernel in kernels for name in kernel.torch_classes[:1]]
    return {name: found for name in names if (found := class_of(name)) is not None}


_KERNELS = tuple(Kernel(name) for name in _C.optimizer_names())
FUSED = fused_classes(_KERNELS)
