"""Sends byte ranges to rank 0 from a rank that does not see its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from zeropg.rank_io.agreement import collective_device, peers_needed, together
from zeropg.rank_io.parallel_files import ByteRange

_STREAM_BYTES = 16 << 20  # per broadcast, on every rank


def stream_to_first(
    group: dist.ProcessGroup,
    operation: str,
    sender: int,
    ranges: Callable[[], Iterator[ByteRange]],
    write: Callable[[ByteRange], None],
) -> None:
    """Lets rank 0 write what `sender` has. All ranks must call.

    By broadcasts, since every backend has them on every device. A failing rank goes on taking part, so that nobody
    waits for it, and tells afterwards: then every rank raises.

    Args:
        ranges: called on `sender` only.
        write: called on rank 0 with bytes (dtype uint8) on the CPU.
    """
    failure: Exception | None = None
    device = collective_device(group)
    chunks = _chunks(ranges()) if group.rank() == sender else None
    while True:
        data = torch.empty(0, dtype=torch.uint8)
        where = torch.full((5,), -1, dtype=torch.int64)  # as of _chunks; -1: the end
        try:
            if chunks is not None and (chunk := next(chunks, None)) is not None:
                where, data = chunk
        except Exception as error:
            failure = error
        where = where.to(device)
        with peers_needed(group, operation, failure):
            dist.broadcast(where, group=group, group_src=sender)
        file, offset, rows, row_bytes, stride = where.tolist()
        if file < 0:
            break
        data = data.to(device) if chunks is not None else data.new_empty(rows * row_bytes, device=device)
        with peers_needed(group, operation, failure):
            dist.broadcast(data, group=group, group_src=sender)
        if group.rank() == 0 and failure is None:
            try:
                values = data.cpu() if rows == 1 else data.cpu().view(rows, row_bytes)
                write(ByteRange(file, offset, values, torch.uint8, stride))
            except Exception as error:
                failure = error
    together(group, operation, lambda: _raise(failure))


def _chunks(ranges: Iterator[ByteRange]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields ([file, offset, rows, bytes of each, stride], the bytes), cast."""
    for part in ranges:
        offset = part.offset
        is_flat = part.values.dim() == 1
        entry_bytes = part.dtype.itemsize * (1 if is_flat else part.values.size(1))
        for values in torch.split(part.values.detach(), max(1, _STREAM_BYTES // entry_bytes)):
            # A copy, since a shard can only be read, and a broadcast asks for memory that it may write to.
            data = values.to(part.dtype, copy=True).contiguous().view(-1).view(torch.uint8)
            rows = 1 if is_flat else values.size(0)
            if data.numel() > 0:
                yield torch.tensor([part.file, offset, rows, data.numel() // rows, part.stride]), data
            offset += data.numel() if is_flat else rows * part.stride


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
