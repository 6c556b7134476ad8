"""DeepSpeed's `comm`: torch.distributed, `init_distributed`, and the summary of `comms_logger`."""

from torch.distributed import *  # noqa: F403
from torch.distributed import is_initialized as is_initialized

from zeropg.deepspeed.distributed import init_distributed as init_distributed
from zeropg.deepspeed.observation.comms_logger import log_summary as log_summary
