"""DeepSpeed's `runtime.activation_checkpointing`, where its `checkpointing` lies."""

from zeropg.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
