"""Where each parameter's elements lie in the flat partitions of the ranks. Pure functions of sizes and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from zeropg.deepspeed.checkpoints.stored import Runs

Shapes = Mapping[str, Sequence[int]]  # of a group's parameters, in the order in which they lie


def split_flat(partitions: Sequence[torch.Tensor], shapes: Shapes, paddings: Sequence[int]) -> dict[str, Runs]:
    """Stages 1 and 2: a group is one flat tensor, cut into one partition per rank.

    partitions: [elements of the rank], by rank; the last ones may lack the padding at the group's end.
    paddings: elements after each parameter.

    Raises ValueError where the partitions are shorter than the parameters, or more than padding is left.
    """
    firsts = [0, *accumulate(partition.numel() for partition in partitions)]
    result: dict[str, Runs] = {}
    offset = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        runs = []
        for first, partition in zip(firsts, partitions, strict=False):
            begin, end = max(offset, first), min(offset + numel, first + partition.numel())
            if begin < end:
                runs.append((begin - offset, partition[begin - first : end - first]))
        result[name] = _covering(name, shape, runs, partitions[0].dtype)
        offset += numel + padding
    _check_rest(firsts[-1] - offset, partitions)
    return result


def split_each(partitions: Sequence[torch.Tensor], shapes: Shapes) -> dict[str, Runs]:
    """Stage 3: each parameter is cut into equal parts, padded at its end; a rank's parts lie one after the other.

    Raises as `split_flat`.
    """
    world_size = len(partitions)
    result: dict[str, Runs] = {}
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // world_size)
        runs = []
        for rank, partition in enumerate(partitions):
            length = min(part, numel - rank * part)
            if length > 0:
                runs.append((rank * part, partition[offset : offset + length]))
        result[name] = _covering(name, shape, runs, partitions[0].dtype)
        offset += part
    _check_rest(min(partition.numel() for partition in partitions) - offset, partitions)
    return result


def _covering(name: str, shape: Sequence[int], runs: list[tuple[int, torch.Tensor]], dtype: torch.dtype) -> Runs:
    found = sum(values.numel() for _, values in runs)
    if found != math.prod(shape) or any(values.dtype != dtype for _, values in runs):
        raise ValueError(
            f"the ranks' files hold {found} elements of '{name}', expected {math.prod(shape)} for shape {list(shape)}: "
            "they are not of one checkpoint, or its tensors were left on an NVMe disk (offload)"
        )
    return Runs(tuple(shape), tuple(runs), dtype)


def _check_rest(rest: int, partitions: Sequence[torch.Tensor]) -> None:
    # What is left is padding, to a multiple of two elements per rank.
    most = 2 * len(partitions)
    if not 0 <= rest <= most:
        raise ValueError(
            f"the ranks' files hold {rest} elements that belong to no parameter, expected padding of 0 to {most}: they "
            "are not of one checkpoint"
        )
