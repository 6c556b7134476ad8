"""What a Trainer's arguments say about sharding: keyword arguments of `fully_shard`, or DeepSpeed's configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from zeropg.deepspeed.config import (
    Config,
    ConfigError,
    fill,
    hidden_size_of,
    hugging_face_auto,
    mismatches,
    read,
)
from zeropg.deepspeed.config.source import load
from zeropg.deepspeed.shard import shard_as_configured
from zeropg.sharding.fully_shard import fully_shard
from zeropg.transformers.unserved import warn_of_unserved

_OPTIONS = {name for name in inspect.signature(fully_shard).parameters if name != "module"}


class GivenSharding:
    """By `Trainer(zeropg=...)`."""

    autocasts = False

    def __init__(self, options: Mapping[str, Any], args: transformers.TrainingArguments) -> None:
        """Raises TypeError for an option that `fully_shard` has not."""
        if unknown := sorted(set(options) - _OPTIONS):
            raise TypeError(
                f"[zeropg] Trainer: zeropg= has {', '.join(map(repr, unknown))}; expected keyword arguments of "
                f"zeropg.fully_shard: {', '.join(sorted(_OPTIONS))}"
            )
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._options = {"param_dtype": dtype, **options}
        self.asked = dict(options)

    def shard(self, model: nn.Module, param_dtype: torch.dtype | None = None) -> None:
        """Shards a model in place. All ranks must call. param_dtype: accelerate's, which the arguments say too."""
        fully_shard(model, **self._options)


class ConfiguredSharding:
    """By `TrainingArguments.deepspeed`."""

    def __init__(self, config: Any, args: transformers.TrainingArguments, model: nn.Module | None) -> None:
        """Raises ConfigError where the configuration cannot be used, or contradicts the arguments."""
        self._raw = dict(load(config))
        for name in ("bf16", "fp16"):  # as accelerate does for DeepSpeed
            if getattr(args, name):
                self._raw.setdefault(name, {"enabled": True})
        self._args = args
        self._hidden_size = hidden_size_of(getattr(model, "config", None))
        self.settings = self._read(None)
        self.asked = {"stage": self.settings.zero_optimization.stage}
        if dist.get_rank() == 0:
            warn_of_unserved(self.settings)

    @property
    def autocasts(self) -> bool:
        """Whether forwards run under autocast to bfloat16: `torch_autocast`."""
        return self.settings.torch_autocast.enabled

    def shard(self, model: nn.Module, param_dtype: torch.dtype | None = None) -> None:
        """Shards a model in place. All ranks must call. param_dtype: accelerate's; the configuration has its own."""
        shard_as_configured(model, self.settings, dist.distributed_c10d._get_default_group())

    def with_schedule(self, num_training_steps: int) -> Config:
        """Returns the configuration with its scheduler, whose length is known only when training begins."""
        return self._read(num_training_steps)

    def _read(self, num_training_steps: int | None) -> Config:
        # The Trainer clips to its own norm. Optimizers that average momenta have to do it themselves, by this key.
        norm = self._args.max_grad_norm
        raw = {"gradient_clipping": norm, **self._raw} if norm is not None and math.isfinite(norm) else self._raw
        if num_training_steps is None:
            raw = {key: value for key, value in raw.items() if key != "scheduler"}
        auto = hugging_face_auto(self._args, hidden_size=self._hidden_size, num_training_steps=num_training_steps)
        if different := mismatches(raw, auto):
            raise ConfigError(different)
        settings = read(fill(raw, auto), world_size=self._args.world_size)
        if settings.tensor_parallel.size > 1:
            raise ConfigError(
                [
                    f"tensor_parallel.autotp_size is {settings.tensor_parallel.size}, and a Trainer gives every rank "
                    "data of its own; leave it out, or train by zeropg.deepspeed.initialize"
                ]
            )
        return settings


def sharding_of(
    options: Mapping[str, Any] | None, args: transformers.TrainingArguments, model: nn.Module | None
) -> GivenSharding | ConfiguredSharding:
    """Returns what a Trainer does with models. Raises ValueError where both ways are used."""
    if args.deepspeed is None:
        return GivenSharding({} if options is None else options, args)
    if options is not None:
        raise ValueError(
            "[zeropg] Trainer: there are zeropg= and TrainingArguments(deepspeed=); expected one of the two"
        )
    return ConfiguredSharding(args.deepspeed, args, model)
