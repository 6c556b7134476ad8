"""Activation checkpointing: `checkpoint_activations`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from zeropg.sharding.activation_places import (
    File,
    Here,
    HostMemory,
    Partition,
    Place,
    Restore,
    check_unwritten,
    version_of,
)
from zeropg.sharding.running_statistics import unchanged_statistics
from zeropg.sharding.subclass import subclass_of
from zeropg.sharding.units import UnitChoice, choose_units

LOGGER = logging.getLogger("zeropg")
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
    torch.no_grad) blocks run as they are. What a block does beside computing it does twice (a counter, an average that
    it keeps), but for the statistics of batch norms. Modules are copied, and saved as state dicts, as before; pickling
    them whole is not available. Method: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost";
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
        NotImplementedError: a block whose `forward` was replaced on the instance; in a forward: a cache of keys and
            values that is not empty. Empty ones (Hugging Face's use_cache) stay empty, which is said once.
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
    # torch looks at tensors among the arguments for the device whose random numbers it must repeat beside the CPU's.
    marker = torch.empty(0, device=_device_of(function, args, kwargs))
    return checkpoint(_Rerun(place, function, args, kwargs), marker, use_reentrant=False)


def _device_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Of the arguments, else of the parameters of modules among them, the first that is no CPU."""
    leaves = _pytree.tree_leaves((args, kwargs))
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices += [next((p.device for p in m.parameters()), torch.device("cpu")) for m in _modules_in(function, leaves)]
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def _modules_in(function: Callable[..., Any], leaves: Iterable[Any]) -> list[nn.Module]:
    candidates = (function, getattr(function, "__self__", None), *leaves)
    return [candidate for candidate in candidates if isinstance(candidate, nn.Module)]


class _Rerun:
    """Calls a function with what it was given the first time, and later with what a place has kept of that.

    The first time it is given the very containers of the caller, which may look for what the function puts into them
    (a list, a cache); later it gets others, filled as they were before it ran.
    """

    def __init__(
        self, place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._place = place
        self._function = function
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._kept: list[Callable[[], Any]] = []
        self._structure: Any = None

    def __call__(self, _: torch.Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            leaves, self._structure = _pytree.tree_flatten((args, kwargs))
            self._kept = [self._keep(leaf) for leaf in leaves]
            return self._function(*args, **kwargs)
        leaves = [restore() for restore in self._kept]
        args, kwargs = _pytree.tree_unflatten(leaves, self._structure)
        with unchanged_statistics(_modules_in(self._function, leaves)):
            return self._function(*args, **kwargs)

    def _keep(self, leaf: Any) -> Callable[[], Any]:
        if not isinstance(leaf, torch.Tensor):
            return lambda: leaf
        if leaf.requires_grad and leaf.is_floating_point() and type(leaf) is torch.Tensor and _is_dense(leaf):
            return _with_gradient(self._place.keep(leaf))
        version = version_of(leaf)  # masks, positions: most are every block's, so they stay where they are

        def restore() -> torch.Tensor:
            check_unwritten(leaf, version)
            return leaf

        return restore


def _with_gradient(restore: Restore) -> Restore:
    return lambda: restore().detach().requires_grad_()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


_has_said_caches = False


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """None in place of Hugging Face's caches of keys and values, as its own checkpointing has it.

    Training asks nothing of them, they would keep what a block need not, and a second run would fill them twice.
    Raises NotImplementedError where one holds a prefix, whose values count.
    """
    global _has_said_caches
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return args, kwargs
    if any(cache.get_seq_length() for cache in caches):
        raise NotImplementedError(
            "[zeropg] checkpoint_activations: a block was given a cache that holds keys and values already, which a "
            "second run of the block would fill twice; train without the prefix (use_cache=False), or leave out units"
        )
    if not _has_said_caches:
        LOGGER.warning("checkpoint_activations: blocks that run again for a backward fill no cache (use_cache=False)")
        _has_said_caches = True
    kept = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


_CLASSES: WeakValueDictionary[type[nn.Module], type[nn.Module]] = WeakValueDictionary()


def _checkpointed(cls: type[nn.Module]) -> type[nn.Module]:
    if (known := _CLASSES.get(cls)) is not None:
        return known

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        args, kwargs = _without_caches(args, kwargs)
        return run_checkpointed(vars(self)[_KEY], cls.forward, self, *args, **kwargs)

    return _CLASSES.setdefault(cls, subclass_of(cls, forward=forward))
