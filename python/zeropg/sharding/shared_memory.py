"""What shares memory with a parameter, which sharding would untie: other parameters and buffers, and views that modules
keep as plain attributes (`self.wt = self.w.t()`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeropg.sharding.nested import tensors_in
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
    """Of two tensors of one storage. Exact, as slices of one tensor may lie between each other."""
    if _bytes_of(a)[0] >= _bytes_of(b)[1] or _bytes_of(b)[0] >= _bytes_of(a)[1]:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    start = min(_bytes_of(a)[0], _bytes_of(b)[0])
    marks = torch.zeros(max(_bytes_of(a)[1], _bytes_of(b)[1]) - start, dtype=torch.bool)

    def marks_of(tensor: torch.Tensor) -> torch.Tensor:
        item = tensor.element_size()
        strides = [stride * item for stride in tensor.stride()]
        return marks.as_strided([*tensor.shape, item], [*strides, 1], _bytes_of(tensor)[0] - start)

    marks_of(a).fill_(True)
    return bool(marks_of(b).any())


class _KeptView(NamedTuple):
    name: str  # of the attribute
    tensor: torch.Tensor
    parameters: list[nn.Parameter]  # in whose memory it lies
    offset: int | None  # elements from the first of the one parameter; None: its strides are not those of that


class KeptViews:
    """Found before parameters get other memory, and put over that: in a plain model they show what steps write."""

    def __init__(self, model: nn.Module) -> None:
        by_storage: dict[int, list[nn.Parameter]] = defaultdict(list)
        for parameter in model.parameters():
            if _has_memory(parameter):
                by_storage[parameter.untyped_storage()._cdata].append(parameter)
        self._found: list[_KeptView] = []
        for name, tensor in _plain_tensors(model):
            around = by_storage.get(tensor.untyped_storage()._cdata, [])
            if inside := [p for p in around if _have_common_byte(tensor, p.detach())]:
                self._found.append(_KeptView(name, tensor, inside, _offset_in(tensor, inside)))

    @torch.no_grad()
    def follow(self, sharded: Iterable[nn.Parameter]) -> None:
        """Puts those of sharded parameters over their memory, or lets reads of them raise where that has no place."""
        ids = set(map(id, sharded))
        for view in self._found:
            (parameter, *others) = view.parameters
            if not ids.isdisjoint(map(id, view.parameters)):
                fits = not others and view.offset is not None and view.tensor.dtype == parameter.dtype
                view.tensor.data = (
                    parameter.detach().as_strided(view.tensor.shape, view.tensor.stride(), view.offset)
                    if fits
                    else _unreadable(view)
                )


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what modules have in attributes, lists and dicts, but for parameters and buffers."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    own = vars(nn.Module()).keys()
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            for tensor in tensors_in(value) if key not in own else ():
                if id(tensor) not in registered and _has_memory(tensor):
                    registered.add(id(tensor))
                    yield ".".join(filter(None, (prefix, key))), tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    is_plain = not is_traceable_wrapper_subclass(tensor) and not tensor.is_meta and not tensor.is_inference()
    return is_plain and tensor.layout == torch.strided and tensor.numel() > 0


def _offset_in(tensor: torch.Tensor, parameters: list[nn.Parameter]) -> int | None:
    parameter = parameters[0]  # which will be contiguous
    offset = int(tensor.storage_offset() - parameter.storage_offset())
    last = offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    is_inside = tensor.dtype == parameter.dtype and offset >= 0 and last < parameter.numel()
    return offset if is_inside and parameter.is_contiguous() else None


def _unreadable(view: _KeptView) -> torch.Tensor:
    one = torch.empty(1, dtype=view.parameters[0].dtype, device=view.tensor.device)  # or torch's words come first
    torch._C._set_storage_data_ptr_access_error_msg(
        one.untyped_storage()._cdata,
        f"[zeropg] '{view.name}' was a view of a parameter when fully_shard gave that other memory, where it has no "
        "place (another dtype, or strides that are not the parameter's): it would show old values. Make it of the "
        "parameter in forward, or keep it as a parameter or buffer of its own.",
    )
    return one.expand(view.tensor.shape)
