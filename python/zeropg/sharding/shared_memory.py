"""Parameters that share memory without being one parameter: sharding would give each its own, and untie them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeropg.sharding.units import UnitPlan


def check_shared_memory(model: nn.Module, plans: list[UnitPlan]) -> None:
    """Raises ValueError naming a parameter and another one, or a buffer, in which elements of it lie."""
    sharded = [(names[0], parameter.detach()) for plan in plans for names, parameter in plan.parameters]
    known = {id(parameter) for plan in plans for _, parameter in plan.parameters}
    others = [(name, p.detach()) for name, p in model.named_parameters() if id(p) not in known]  # ignored ones
    others += list(model.named_buffers())
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in sharded + others:
        if is_traceable_wrapper_subclass(tensor) or tensor.is_meta:
            continue  # without memory of its own
        if tensor.layout == torch.strided and tensor.numel() > 0:
            by_storage[tensor.untyped_storage()._cdata].append((name, tensor))
    names = {name for name, _ in sharded}
    for tensors in by_storage.values():
        pair = _overlapping(tensors, names) if len(tensors) > 1 else None
        if pair is not None:
            raise ValueError(
                f"[zeropg] fully_shard: {pair[0]!r} and {pair[1]!r} share memory but are not one parameter; sharded, "
                "each would get memory of its own, and writes to one would not reach the other. Tie them by one "
                "nn.Parameter object (b.weight = a.weight), or clone() one of them."
            )


def _overlapping(tensors: list[tuple[str, torch.Tensor]], sharded: set[str]) -> tuple[str, str] | None:
    """The first pair of tensors of one storage, one of them sharded, that have a byte in common."""
    tensors = sorted(tensors, key=lambda item: _bytes_of(item[1])[0])
    for index, (name, tensor) in enumerate(tensors):
        for other_name, other in tensors[index + 1 :]:
            if _bytes_of(other)[0] >= _bytes_of(tensor)[1]:
                break
            if (name in sharded or other_name in sharded) and _have_common_byte(tensor, other):
                return name, other_name
    return None


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte in the storage, and the one after the last."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def _have_common_byte(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Exact, as slices of one tensor may lie between each other."""
    start = min(_bytes_of(a)[0], _bytes_of(b)[0])
    marks = torch.zeros(max(_bytes_of(a)[1], _bytes_of(b)[1]) - start, dtype=torch.bool)

    def marks_of(tensor: torch.Tensor) -> torch.Tensor:
        item = tensor.element_size()
        strides = [stride * item for stride in tensor.stride()]
        return marks.as_strided([*tensor.shape, item], [*strides, 1], _bytes_of(tensor)[0] - start)

    marks_of(a).fill_(True)
    return bool(marks_of(b).any())
