"""The block `activation_checkpointing`."""

from __future__ import annotations

from zeropg.deepspeed.config.blocks.section import Count, Section


class ActivationCheckpointing(Section):
    """`activation_checkpointing`: options of `deepspeed.checkpointing.checkpoint`."""

    partition_activations: bool = False
    number_checkpoints: Count | None = None
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
