"""DeepSpeed's `utils.logging`: its logger, and messages of some ranks alone."""

import functools
import logging
from collections.abc import Sequence

import torch.distributed as dist

logger = logging.getLogger("zeropg")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the ranks of the list; None: on rank 0; [-1]: on all. Does not communicate."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    wanted = [0] if ranks is None else list(ranks)
    if rank in wanted or -1 in wanted:
        logger.log(level, "[zeropg rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """As log_dist, and the same message once only."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)
