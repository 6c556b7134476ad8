"""Process groups that torch.distributed does not know of."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def error_of_a_group(store: Any, options: Any) -> str:
    """Makes a group of all ranks, uses it once and closes it. Returns the error of whichever failed, else ""."""
    from zeropg import _C

    try:
        group = _C.ProcessGroupZero(store, dist.get_rank(), dist.get_world_size(), options)
        group.barrier().wait()
        group.shutdown()
    except dist.DistBackendError as error:
        return str(error)
    return ""
