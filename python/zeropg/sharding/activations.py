"""Activation checkpointing: `checkpoint_activations`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from zeropg.sharding.activation_places import File, Here, HostMemory, Partition, Place, Restore, check_unwritten
from zeropg.sharding.units import UnitChoice, choose_units

_PLACES: dict[str, Callable[[], Place]] = {"recompute": Here, "cpu": HostMemory}
_KEY = "_zeropg_activations"  # of a block: the place where its inputs wait


def checkpoint_activations(
    module: nn.Module,
    *,
    to: str | os.PathLike[str] = "recompute",
    units: Iterable[UnitChoice] | None = None,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Keeps only the inputs of each block for its backward, which runs the block again. In place; not collective.

    Works before and after `fully_shard`, in every stage, and without it. Gradients are those of the plain module, to
    the bit where its operations are deterministic; dropout draws the same numbers again. Without gradients (eval under
    torch.no_grad) blocks run as they are. Method: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost";
    for places other than memory Rajbhandari et al. 2019, "ZeRO", section 6.1.

    Args:
        module: a model, or one block.
        to: where floating inputs that need a gradient wait meanwhile.
            "recompute": where they are.
            "cpu": in host memory; on a CPU model that is where they are.
            a directory on a local disk: in a file of this rank there, without a name, mode 0600.
            "partition": a part of them on each rank of `group`, whose ranks compute the same activations (tensor
              parallelism); all of them must run the same blocks in the same order.
        units: the blocks: submodules, their names or classes. Default: the blocks that `fully_shard` makes units, or
            the module itself where there are none.
        group: for "partition"; default: the world. Where its ranks have different activations each keeps its own.

    Returns:
        The same module. The class of each block becomes a subclass of its own class, of the same name.

    Raises:
        TypeError: `module` is no module.
        ValueError: a place or unit that does not exist, `group` with another place, or blocks that have it already.
        NotImplementedError: a block whose `forward` was replaced on the instance.
        OSError: the directory takes no file; in a forward: it is full.
        RuntimeError: in a backward: an input was changed in place after the block had run.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"[zeropg] checkpoint_activations: expected a torch.nn.Module, got {type(module).__name__}")
    if group is not None and to != "partition":
        raise ValueError(
            f"[zeropg] checkpoint_activations: group is for to='partition', and to is {to!r}; leave it out"
        )
    blocks = choose_units(module, units, "checkpoint_activations") or [("", module)]
    for name, block in blocks:
        if any(_KEY in vars(part) for part in block.modules()):
            raise ValueError(
                f"[zeropg] checkpoint_activations: block {name!r} is checkpointed already; call it once for each block"
            )
        if "forward" in vars(block):
            raise NotImplementedError(
                f"[zeropg] checkpoint_activations: `forward` of block {name!r} was replaced on the instance, which "
                "hides the class's; call checkpoint_activations before whatever replaces it"
            )
    place = Partition(group) if to == "partition" else _PLACES[to]() if to in _PLACES else File(to)
    for _, block in blocks:
        vars(block)[_KEY] = place
        block.__class__ = _checkpointed(type(block))
    return module


def run_checkpointed(place: Place, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns function(*args, **kwargs), which a backward runs again, with tensors from `place`."""
    leaves, structure = _pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    rerun = _Rerun(place, function, leaves, structure)
    # torch looks at tensors among the arguments for the device whose random numbers it must repeat.
    marker = tensors[0].new_empty(0) if tensors else torch.empty(0)
    return checkpoint(rerun, marker.detach(), use_reentrant=False)


class _Rerun:
    """Calls a function with what it was given the first time, and later with what a place has kept of that."""

    def __init__(self, place: Place, function: Callable[..., Any], leaves: list[Any], structure: Any) -> None:
        self._place = place
        self._function = function
        self._first: list[Any] | None = leaves
        self._structure = structure
        self._kept: list[Callable[[], Any]] = []

    def __call__(self, _: torch.Tensor) -> Any:
        if self._first is not None:
            leaves, self._first = self._first, None
            self._kept = [self._keep(leaf) for leaf in leaves]
        else:
            leaves = [restore() for restore in self._kept]
        args, kwargs = _pytree.tree_unflatten(leaves, self._structure)
        return self._function(*args, **kwargs)

    def _keep(self, leaf: Any) -> Callable[[], Any]:
        if not isinstance(leaf, torch.Tensor):
            return lambda: leaf
        if leaf.requires_grad and leaf.is_floating_point() and type(leaf) is torch.Tensor and _is_dense(leaf):
            return _with_gradient(self._place.keep(leaf))
        version = leaf._version  # masks, positions: most are every block's, so they stay where they are

        def restore() -> torch.Tensor:
            check_unwritten(leaf, version)
            return leaf

        return restore


def _with_gradient(restore: Restore) -> Restore:
    return lambda: restore().detach().requires_grad_()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _checkpointed(cls: type[nn.Module]) -> type[nn.Module]:
    if cls in _CLASSES:
        return _CLASSES[cls]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        return run_checkpointed(vars(self)[_KEY], cls.forward, self, *args, **kwargs)

    made = type(cls.__name__, (cls,), {"forward": forward, "__doc__": cls.__doc__})
    made.__qualname__, made.__module__ = cls.__qualname__, cls.__module__
    _CLASSES[cls] = made
    return made
