"""The slow truth: what a collective must give, computed from every rank's input by plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
MOVABLE = (*INTEGERS, *FLOATS, *COMPLEX, torch.bool, torch.float8_e4m3fn)


def values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The input of `rank`: pseudo-random, the same wherever it is computed. Shape [numel]."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if dtype in INTEGERS:
        low = 0 if dtype == torch.uint8 else -100
        return torch.randint(low, 100, (numel,), generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(numel, generator=generator, dtype=dtype)
    return torch.randn(numel, generator=generator).to(dtype)


def reduced(
    tensors: Sequence[torch.Tensor],
    op: dist.ReduceOp.RedOpType,
    factor: float = 1.0,
    nodes: Sequence[Sequence[int]] | None = None,
    domains: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """In rank order on each node, then in the order of nodes (None: all ranks are on one); or so over domains of one.

    16-bit floats are added in fp32 and rounded once per node, if there are several, and once at the end; everything
    else is added in its own dtype. Averages divide once, at the end; those of fp16 before the first rounding, and those
    of integers toward zero.
    """
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    inputs = [tensor.to(wide) * factor if op == dist.ReduceOp.PREMUL_SUM else tensor.to(wide) for tensor in tensors]
    divisor = len(tensors) if op == dist.ReduceOp.AVG else 1
    if nodes is not None and len(nodes) > 1:
        inputs = [folded([inputs[rank] for rank in node], op) for node in nodes]
        if dtype == torch.float16 and divisor > 1:
            inputs, divisor = [sum_of_node / divisor for sum_of_node in inputs], 1
        inputs = [sum_of_node.to(dtype).to(wide) for sum_of_node in inputs]
    if domains is not None:
        inputs = [folded([inputs[rank] for rank in domain], op) for domain in domains]
    result = folded(inputs, op)
    if divisor > 1:
        result = (
            result / divisor
            if dtype.is_floating_point or dtype.is_complex
            else result.div(divisor, rounding_mode="trunc")
        )
    return result.to(dtype)


def folded(tensors: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """One after the other, in their own dtype; an average's sum."""
    dtype = tensors[0].dtype
    first, *rest = tensors
    result = first.clone()
    for tensor in rest:
        if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM):
            result = result | tensor if dtype == torch.bool else result + tensor
        elif op == dist.ReduceOp.PRODUCT:
            result = result & tensor if dtype == torch.bool else result * tensor
        elif op == dist.ReduceOp.MIN:
            result = torch.minimum(result, tensor)
        elif op == dist.ReduceOp.MAX:
            result = torch.maximum(result, tensor)
        elif op == dist.ReduceOp.BAND:
            result = result & tensor
        elif op == dist.ReduceOp.BOR:
            result = result | tensor
        else:
            result = result ^ tensor
    return result


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Bit for bit."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    same = torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert same, f"{what}: {actual} instead of {expected}"
