"""A distributed parameter (a DTensor) and the plain tensor on this rank that is its part of it.

Torch's module for DTensors is slow to import, and nobody has one who has not imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a torch.distributed.tensor.DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor whose memory it is: this rank's part of a distributed one, itself otherwise."""
    return tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


class Part(NamedTuple):
    """Which elements of a whole tensor this rank has: offsets[d] <= index[d] < offsets[d] + sizes[d]."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def part_of(tensor: torch.Tensor) -> Part:
    """Of a tensor that `check_distributed` has accepted, or a plain one."""
    if not is_distributed(tensor):
        return Part((0,) * tensor.dim(), tuple(tensor.shape))
    mesh, coordinate = _mesh(tensor), _coordinate(tensor)
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for size, place, placement in zip(mesh.shape, coordinate, _placements(tensor), strict=True):
        if placement.is_replicate():
            continue
        dim = placement.dim % tensor.dim()
        chunk = -(-sizes[dim] // size)  # as torch.chunk cuts
        start = min(place * chunk, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return Part(tuple(offsets), tuple(sizes))


def placements_text(tensor: torch.Tensor) -> str:
    """How it is placed, for people and for comparisons: "shard(0), replicate over tp 2 x 4"; a plain one "whole"."""
    if not is_distributed(tensor):
        return "whole"
    mesh = _mesh(tensor)
    names = ", ".join(map(str, mesh.mesh_dim_names or range(mesh.ndim)))
    places = ", ".join("replicate" if p.is_replicate() else f"shard({p.dim})" for p in _placements(tensor))
    return f"{places} over {names} {' x '.join(map(str, mesh.shape))}"


def groups_around(tensor: torch.Tensor, *, only_split: bool) -> list[dist.ProcessGroup]:
    """This rank's group of each dimension of the tensor's mesh that has several ranks; none of a plain tensor.

    only_split: of dimensions that cut the tensor alone.
    """
    if not is_distributed(tensor):
        return []
    mesh = _mesh(tensor)
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(_placements(tensor))
        if mesh.size(dim) > 1 and not (only_split and placement.is_replicate())
    ]


def check_distributed(name: str, parameter: torch.Tensor) -> None:
    """Raises NotImplementedError for a placement of which this rank's part is no box, or that is none."""
    local = local_of(parameter)
    if is_traceable_wrapper_subclass(local):
        raise NotImplementedError(
            f"[zeropg] fully_shard: the part that this rank has of {name!r} is a {type(local).__name__}; expected a "
            "plain tensor. Distribute the plain parameter, or name it in ignored_params."
        )
    others = [p for p in _placements(parameter) if type(p).__name__ not in ("Shard", "Replicate")]
    if others or not parameter.is_contiguous():
        what = f"is placed as {others[0]}" if others else f"has strides {tuple(parameter.stride())}"
        raise NotImplementedError(
            f"[zeropg] fully_shard: {name!r} is a DTensor and {what}; expected Shard or Replicate in every dimension "
            "of its mesh, and a contiguous tensor. Distribute it so (parallelize_module does), or name it in "
            "ignored_params."
        )
    if tuple(local.shape) != part_of(parameter).sizes:
        raise NotImplementedError(
            f"[zeropg] fully_shard: this rank has {list(local.shape)} of {name!r} ({list(parameter.shape)}, "
            f"{placements_text(parameter)}); expected {list(part_of(parameter).sizes)}, as distribute_tensor cuts."
        )


def functions_of(parameter: torch.Tensor) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """What the core asks of torch: (a gradient's local part, a tensor of the parameter's kind over a local one)."""
    mesh, placements = _mesh(parameter), _placements(parameter)
    shape, stride = parameter.shape, parameter.stride()

    def local_gradient(gradient: Any) -> torch.Tensor:
        if not is_distributed(gradient):
            raise TypeError(
                f"[zeropg] the gradient of a DTensor of shape {list(shape)} is a {type(gradient).__name__}; expected a "
                "DTensor. Put it there by torch.distributed.tensor.DTensor.from_local or distribute_tensor."
            )
        if tuple(gradient.placements) != placements:
            gradient = gradient.redistribute(mesh, placements)
        local = cast("torch.Tensor", gradient._local_tensor)
        return cast("Any", local).wait() if hasattr(local, "wait") else local  # what redistribute returns at once

    def over(local: torch.Tensor) -> torch.Tensor:
        kind = cast("Any", type(parameter))
        return cast(
            "torch.Tensor", kind.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        )

    return local_gradient, over


@torch.no_grad()
def follow_dtype(parameter: Any, dtype: torch.dtype) -> None:
    """Makes a distributed parameter say the dtype that its local part has, or is about to get; in place."""
    if not is_distributed(parameter) or parameter.dtype == dtype:
        return
    _, over = functions_of(parameter)
    like: Any = over(torch.empty_like(parameter._local_tensor, dtype=dtype, device=parameter.device))
    parameter.data = like
    parameter._spec = like._spec


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh


def _coordinate(tensor: Any) -> Sequence[int]:
    return tensor.device_mesh.get_coordinate()  # type: ignore[no-any-return]


def _placements(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.placements)
