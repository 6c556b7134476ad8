"""`TrainingArguments`: those of transformers, with zeropg's process group and without the package deepspeed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import transformers

from zeropg.deepspeed.distributed import init_distributed


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """As transformers' own; all ranks must make one.

    - Under torchrun the default process group is one of zeropg, unless there is one already; without an accelerator
      `use_cpu` is set, since transformers counts one process otherwise.
    - `deepspeed`: a configuration of DeepSpeed, a dictionary or a path, for `zeropg.transformers.Trainer`. The package
      deepspeed is not needed.
    """

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if "RANK" in os.environ and not dist.is_initialized():
            init_distributed(timeout=timedelta(seconds=self.ddp_timeout))
        deepspeed, self.deepspeed = self.deepspeed, None  # else transformers makes DeepSpeed's own objects of it
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.deepspeed = deepspeed
