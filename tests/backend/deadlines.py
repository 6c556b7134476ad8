"""Groups whose operations have little time, but not their making: that a busy machine may need longer for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def give_seconds(group: Any, seconds: float) -> Any:
    """The group, from whose next operation on the timeout is this one."""
    group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=seconds))
    return group


def new_group_with(seconds: float) -> Any:
    return give_seconds(dist.new_group(), seconds)
