"""DeepSpeed's names over zeropg: `import zeropg.deepspeed as deepspeed` is the one line that a script changes."""

from typing import Any

from zeropg.deepspeed import checkpointing as checkpointing
from zeropg.deepspeed import comm as comm
from zeropg.deepspeed import comm as dist
from zeropg.deepspeed import ops as ops
from zeropg.deepspeed import runtime as runtime
from zeropg.deepspeed import utils as utils
from zeropg.deepspeed import zero as zero
from zeropg.deepspeed.accelerator import get_accelerator
from zeropg.deepspeed.arguments import add_config_arguments
from zeropg.deepspeed.dataloader import DeepSpeedDataLoader, RepeatingLoader
from zeropg.deepspeed.distributed import init_distributed
from zeropg.deepspeed.engine import DeepSpeedEngine
from zeropg.deepspeed.initialize import initialize
from zeropg.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from zeropg.deepspeed.tensor_parallel.prepare import tp_model_init
from zeropg.deepspeed.unavailable import NAMES, README, explain_missing_modules
from zeropg.deepspeed.utils import OnDevice, log_dist, logger

__version__ = "0.19.8"  # of DeepSpeed, whose names these are: scripts compare it

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "OnDevice",
    "RepeatingLoader",
    "add_config_arguments",
    "dist",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "tp_model_init",
]


explain_missing_modules(__name__)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"[zeropg] deepspeed.{name} is not available: {NAMES.get(name, README)}")
