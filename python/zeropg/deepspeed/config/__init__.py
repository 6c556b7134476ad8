"""DeepSpeed's JSON configuration: every key of it, and what becomes of it here.

`read` makes a `Config` whose attributes are DeepSpeed's keys; `sharding_arguments`, `optimizer_of` and `scheduler_of`
say it in zeropg's words; `fill` and `hugging_face_auto` replace "auto". No key is ignored in silence: `KEYS` has a row
for each, and what is not served is refused with what to use instead. `python -m zeropg config` prints that.
"""

from zeropg.deepspeed.config.auto import fill, hidden_size_of, hugging_face_auto, mismatches
from zeropg.deepspeed.config.error import ConfigError
from zeropg.deepspeed.config.keys import KEYS
from zeropg.deepspeed.config.model import Config
from zeropg.deepspeed.config.optimizers import optimizer_of, scheduler_of
from zeropg.deepspeed.config.read import read
from zeropg.deepspeed.config.translate import sharding_arguments

__all__ = [
    "KEYS",
    "Config",
    "ConfigError",
    "fill",
    "hidden_size_of",
    "hugging_face_auto",
    "mismatches",
    "optimizer_of",
    "read",
    "scheduler_of",
    "sharding_arguments",
]
