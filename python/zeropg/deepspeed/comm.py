"""DeepSpeed's `comm`: torch.distributed, `init_distributed`, and the summary of `comms_logger`."""

import os

from torch.distributed import *  # noqa: F403
from torch.distributed import ProcessGroup, distributed_c10d, get_process_group_ranks
from torch.distributed import is_initialized as is_initialized

from zeropg.deepspeed.distributed import init_distributed as init_distributed
from zeropg.deepspeed.observation.comms_logger import log_summary as log_summary


def get_local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def get_world_group() -> ProcessGroup:
    """The group of all ranks. Raises ValueError where there is none yet."""
    return distributed_c10d._get_default_group()


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """The global ranks of a group's members, in its order; default: all."""
    return get_process_group_ranks(group)
