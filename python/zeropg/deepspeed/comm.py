"""DeepSpeed's `comm`: torch.distributed, and `init_distributed`."""

from torch.distributed import *  # noqa: F403
from torch.distributed import is_initialized as is_initialized

from zeropg.deepspeed.distributed import init_distributed as init_distributed
