"""`zero.Init`: where a program builds a model that `initialize` shards."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.deepspeed.distributed import init_distributed


class Init:
    """A context in which a model is built, with DeepSpeed's arguments.

    The model is built whole on every rank, in its own dtype, and `initialize` shards it and gives it rank 0's values:
    the program needs no change, but each rank needs memory for the whole model until then. One that does not fit is
    built inside `with torch.device("meta")` instead; `initialize` then makes its values by the modules'
    reset_parameters.

    Args:
        module: a model that is built already; it stays as it is.
        remote_device: None or "cpu". "nvme" raises NotImplementedError.
        enabled: False: nothing happens.
        dtype: without effect: masters are fp32, and the configuration says in which dtype a model computes.

    The other arguments have no effect: `initialize` reads its own configuration.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        if enabled and remote_device not in (None, "none", "cpu"):
            raise NotImplementedError(
                f"[zeropg] zero.Init: remote_device={remote_device!r} is not available; build the model in memory, or "
                'inside `with torch.device("meta")`'
            )
        self._enabled = enabled

    def __enter__(self) -> Init:
        if self._enabled:
            init_distributed()
            if dist.get_rank() == 0:
                print("[zeropg] zero.Init: every rank builds the whole model; initialize shards it", file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""
