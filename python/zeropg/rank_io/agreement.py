"""Ranks tell each other how a step went, so that one rank's failure becomes the same clear error on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# A peer's message is text to show, nothing more; a peer gone mad must not fill this rank's memory.
_MAX_TEXT_BYTES = 1 << 20
_EXCEPTIONS: dict[str, type[Exception]] = {
    "FileNotFoundError": FileNotFoundError,  # before OSError, from which it derives
    "OSError": OSError,
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
    "MemoryError": MemoryError,
    "RuntimeError": RuntimeError,  # last: others derive from it
}


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """Returns the device on which `group` moves small tensors: the CPU where it can."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device(sorted(kinds)[0], torch.cuda.current_device())


def gather_rows(group: dist.ProcessGroup, row: torch.Tensor) -> torch.Tensor:
    """Returns every rank's `row` [n], on the CPU as [ranks, n]. Collective; n and dtype are the same on all ranks."""
    own = row.to(collective_device(group))
    rows = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(rows, own, group=group)
    return torch.stack(rows).cpu()


def together(group: dist.ProcessGroup, operation: str, action: Callable[[], Any]) -> list[Any]:
    """Runs `action` on this rank and returns every rank's result, by rank. Collective.

    Args:
        group: all its ranks must call this, in the same order.
        operation: the public function's name, for messages.
        action: returns a JSON value. What it raises is raised on every rank, naming the ranks that failed.

    Raises:
        Exception: of the kind that the first failing rank met, with the same words on every rank.
        DistBackendError: a rank is gone, so nobody knows how the step went there.
    """
    try:
        report: dict[str, Any] = {"value": action()}
    except Exception as error:
        report = failure_report(error)
        cause: Exception | None = error
    else:
        cause = None
    with peers_needed(group, operation, cause):
        texts = _gather_texts(group, json.dumps(report))
    reports = [json.loads(text) for text in texts]
    failed = {rank: entry for rank, entry in enumerate(reports) if "error" in entry}
    if failed:
        raise_failures(group.rank(), group.size(), operation, failed, cause)
    return [entry["value"] for entry in reports]


def check_same(group: dist.ProcessGroup, operation: str, announced: list[dict[str, str]]) -> None:
    """Raises ValueError, naming the first argument that is not the same on all ranks and the ranks that differ.

    announced: per rank, what was passed by the argument's name; the same list on every rank.
    """
    for key, value in announced[0].items():
        others = [rank for rank, entry in enumerate(announced) if entry[key] != value]
        if others:
            raise ValueError(
                f"[zeropg rank {group.rank()}/{group.size()}] {operation}: {key} is {value!r} on rank 0, but "
                f"{announced[others[0]][key]!r} on rank {others[0]} (ranks that differ: "
                f"{', '.join(map(str, others))}); pass the same on every rank"
            )


@contextmanager
def peers_needed(group: dist.ProcessGroup, operation: str, own_failure: Exception | None = None) -> Iterator[None]:
    """Turns a failed collective inside the block into a DistBackendError that says what it means for `operation`.

    What else is raised there, such as a signal handler's own exception, passes.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        own = f"; this rank itself had failed: {own_failure}" if own_failure else ""
        raise dist.DistBackendError(
            f"[zeropg rank {group.rank()}/{group.size()}] {operation}: the ranks cannot reach each other any more: one "
            f"of them died, is stuck, or has not called it, as all must ({error}){own}; look at the other ranks' logs, "
            "then start again"
        ) from (own_failure or error)


def broadcast_text(group: dist.ProcessGroup, operation: str, text: str | None) -> str:
    """Returns rank 0's `text` on every rank. Collective."""
    device = collective_device(group)
    data = torch.frombuffer(bytearray((text or "").encode()), dtype=torch.uint8) if text else torch.empty(0)
    length = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    with peers_needed(group, operation):
        dist.broadcast(length, group=group, group_src=0)
        size = int(length)
        if size == 0:
            return ""
        data = data.to(device) if group.rank() == 0 else torch.empty(size, dtype=torch.uint8, device=device)
        dist.broadcast(data, group=group, group_src=0)
    return data.cpu().numpy().tobytes().decode()


def failure_report(error: Exception) -> dict[str, Any]:
    """What the other ranks are told about an exception: a JSON value."""
    return {"error": _describe(error), "message": _message(error), "errno": getattr(error, "errno", None)}


def raise_failures(
    rank: int, world_size: int, operation: str, failed: dict[int, dict[str, Any]], cause: Exception | None
) -> NoReturn:
    """Raises one exception for the reports of the ranks that failed; the same words on every rank."""
    raise _joint_error(f"[zeropg rank {rank}/{world_size}] {operation}", failed) from cause


def _describe(error: Exception) -> str:
    return next((name for name, kind in _EXCEPTIONS.items() if isinstance(error, kind)), type(error).__name__)


def _message(error: Exception) -> str:
    # The core's OSErrors say path, offset and errno themselves; Python's say them in str().
    if isinstance(error, OSError) and error.filename is None and error.strerror:
        return error.strerror
    return str(error)


def _joint_error(context: str, failed: dict[int, dict[str, Any]]) -> Exception:
    ranks_by_message: dict[str, list[str]] = {}
    for rank, entry in failed.items():
        kind = "" if entry["error"] in _EXCEPTIONS else f"{entry['error']}: "
        ranks_by_message.setdefault(kind + str(entry["message"]), []).append(str(rank))
    what = "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}: {message}"
        for message, ranks in ranks_by_message.items()
    )
    text = f"{context}: {what}"
    first = next(iter(failed.values()))
    error = _EXCEPTIONS.get(str(first["error"]), RuntimeError)(text)
    if isinstance(error, OSError):
        error.errno = first["errno"]  # str(error) stays the text: it names the number already
    return error


def _gather_texts(group: dist.ProcessGroup, text: str) -> list[str]:
    data = text.encode()
    if len(data) > _MAX_TEXT_BYTES:
        report = json.loads(text)
        what = str(report.get("message", f"this rank has {len(data)} bytes to tell, more than {_MAX_TEXT_BYTES}"))
        data = json.dumps({"error": "RuntimeError", "message": what[: _MAX_TEXT_BYTES // 8]}).encode()
    sizes = gather_rows(group, torch.tensor([len(data)])).flatten().tolist()
    if not all(0 < size <= _MAX_TEXT_BYTES for size in sizes):
        raise RuntimeError(f"the ranks sent texts of {sizes} bytes, expected 1 to {_MAX_TEXT_BYTES}")
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = gather_rows(group, padded)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]
