"""DeepSpeed's `runtime.activation_checkpointing.checkpointing`: `deepspeed.checkpointing` under its full name."""

from zeropg.deepspeed.checkpointing import checkpoint, configure, is_configured, non_reentrant_checkpoint, reset

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]
