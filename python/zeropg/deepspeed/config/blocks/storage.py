"""The blocks `checkpoint` and `aio`: how files are written and read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zeropg.deepspeed.config.blocks.section import Count, Positive, Section

_Upper = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)


class ParallelWrite(Section):
    """`checkpoint.parallel_write`."""

    pipeline_stage: bool = False


class Writer(Section):
    """`checkpoint.writer`; the buffer in bytes."""

    type: Annotated[Literal["MOCK", "PYTHON", "FAST"], _Upper] = "FAST"
    io_buffer_size: Count = 64 << 20
    io_buffer_double: bool = True
    show_statistics: bool = False
    data_parallel: Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], _Upper] | None = None
    decoupled: bool = False
    io_multiplier: Positive = 1


class Checkpoint(Section):
    """`checkpoint`."""

    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], _Upper] = "WARN"
    load_universal: bool = False
    use_node_local_storage: bool = False
    parallel_write: ParallelWrite = Field(default_factory=ParallelWrite)
    checkpoint_serialization: bool = True
    writer: Writer = Field(default_factory=Writer)


class Aio(Section):
    """`aio`: how files of an offload are read and written; blocks in bytes."""

    block_size: Positive = 1 << 20
    queue_depth: Positive = 8
    intra_op_parallelism: Positive = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False
