"""DeepSpeed's JSON configuration: every key of it, and what becomes of it here.

`read` makes a `Config` whose attributes are DeepSpeed's keys. No key is ignored in silence: `KEYS` has a row for each,
and what is not served is refused with what to use instead.
"""

from zeropg.deepspeed.config.error import ConfigError
from zeropg.deepspeed.config.model import Config
from zeropg.deepspeed.config.read import read

__all__ = ["Config", "ConfigError", "read"]
