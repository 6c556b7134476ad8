"""Which of zeropg's fused kernels steps a torch.optim.Optimizer: what the C++ registry says of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zeropg import optim
from zeropg._native import _C

Group = dict[str, Any]


class Kernel:
    """One fused kernel, and what of a param group it reads."""

    def __init__(self, name: str):
        self.optimizer = _C.make_optimizer(name)
        self.name = self.optimizer.name
        self.counts_steps = self.optimizer.counts_steps
        self.torch_classes = self.optimizer.torch_classes
        self.torch_flags = self.optimizer.torch_flags
        self._hyperparameters = tuple(self.optimizer.hyperparameters)

    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Returns what `group` says of them; torch's `betas` are `beta1` and `beta2`."""
        values = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False)) | dict(group)
        return {key: number(values[key]) for key in self._hyperparameters}

    def check(self, hyperparameters: dict[str, float]) -> None:
        """Raises ValueError for what no step takes: by a step of one element."""
        slots = self.optimizer.state_slots(hyperparameters)
        self.optimizer.step(
            torch.zeros(1),
            torch.zeros(1),
            [torch.zeros(1) for _ in slots],
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

    def __init__(self, choices: Sequence[Kernel], default: Kernel):
        self._choices = choices
        self.default = default

    def of(self, options: Mapping[str, Any]) -> Kernel:
        """Returns the kernel for a param group, or for an optimizer's defaults."""
        flags = {key: bool(options.get(key, value)) for key, value in self.default.torch_flags.items()}
        return next((kernel for kernel in self._choices if kernel.torch_flags == flags), self.default)


def kernels_for(optimizer: torch.optim.Optimizer) -> Kernels | None:
    """Returns the kernels for an optimizer whose class they name, None where there are none."""
    name = type(optimizer).__name__
    if FUSED.get(name) is not type(optimizer):
        return None
    choices = [kernel for kernel in _KERNELS if name in kernel.torch_classes]
    by_class = Kernels(choices, next(kernel for kernel in choices if kernel.torch_classes[0] == name))
    return Kernels(choices, by_class.of(optimizer.defaults))


def number(value: Any) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def class_of(name: str) -> type[torch.optim.Optimizer] | None:
    """Returns the class that a kernel calls so: torch.optim's, or else zeropg.optim's; None where there is none."""
    return getattr(torch.optim, name, None) or getattr(optim, name, None)


def fused_classes(kernels: Iterable[Kernel]) -> dict[str, type[torch.optim.Optimizer]]:
    """Returns, by their names, the classes that a kernel is by their defaults."""
    names = [name for kernel in kernels for name in kernel.torch_classes[:1]]
    return {name: found for name in names if (found := class_of(name)) is not None}


_KERNELS = tuple(Kernel(name) for name in _C.optimizer_names())
FUSED = fused_classes(_KERNELS)
