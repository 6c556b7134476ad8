"""DeepSpeed's `runtime.engine`, for scripts that import its class from there."""

from zeropg.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
