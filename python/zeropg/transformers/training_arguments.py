"""`TrainingArguments`: those of transformers, with zeropg's process group and without the package deepspeed."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
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
    - Beside arguments of another library, such as TRL's, it comes last: `class Arguments(trl.SFTConfig,
      TrainingArguments)`. Raises TypeError where it would hide their defaults.
    """

    def __post_init__(self) -> None:
        _check_defaults(type(self))
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if "RANK" in os.environ and not dist.is_initialized():
            init_distributed(timeout=timedelta(seconds=self.ddp_timeout))
        deepspeed, self.deepspeed = self.deepspeed, None  # else transformers makes DeepSpeed's own objects of it
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.deepspeed = deepspeed


def _check_defaults(made: type[TrainingArguments]) -> None:
    base = {field.name: field.default for field in fields(transformers.TrainingArguments)}
    here = {field.name: field.default for field in fields(made)}
    for behind in made.__mro__[made.__mro__.index(TrainingArguments) + 1 :]:
        if not issubclass(behind, transformers.TrainingArguments):
            continue
        lost = [one.name for one in fields(behind) if one.default != base.get(one.name, one.default) == here[one.name]]
        if lost:
            raise TypeError(
                f"[zeropg] {made.__name__}: the defaults of {behind.__name__} ({', '.join(lost)}) are lost; name "
                f"{behind.__name__} first: class {made.__name__}({behind.__name__}, TrainingArguments)"
            )
