"""The block `activation_checkpointing`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from zeropg.deepspeed.config.blocks.section import Count, Section

# Many files say false where DeepSpeed, which does not check this block, has null.
_Number = Annotated[Count | None, BeforeValidator(lambda number: None if number is False else number)]


class ActivationCheckpointing(Section):
    """`activation_checkpointing`: options of `deepspeed.checkpointing.checkpoint`."""

    partition_activations: bool = False
    number_checkpoints: _Number = None
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
