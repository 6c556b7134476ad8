"""Hugging Face accelerate over zeropg: `prepare` shards a model, and the accelerator's calls work on it."""

try:
    import accelerate as _accelerate  # noqa: F401
except ImportError as error:
    raise ImportError(
        "[zeropg] zeropg.accelerate needs the package accelerate; install it: pip install 'zeropg[accelerate]'"
    ) from error

from zeropg.accelerate.prepare import prepare
from zeropg.accelerate.sharded_accelerator import ShardedAccelerator

__all__ = ["ShardedAccelerator", "prepare"]
