"""`Seq2SeqTrainer`: transformers' own over zeropg, which generates in evaluations."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from zeropg.sharding.access import full_parameters
from zeropg.sharding.sharded_class import FullyShardedModule
from zeropg.sharding.state import state_of
from zeropg.transformers.trainer import Trainer
from zeropg.transformers.training_arguments import TrainingArguments


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):
    """As transformers' own, with what zeropg.transformers.TrainingArguments has; all ranks must make one."""


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """zeropg.transformers.Trainer with what transformers' Seq2SeqTrainer adds.

    With `predict_with_generate` the whole model is in each rank's memory while a batch is generated, in stage 3 also:
    ranks generate texts of different lengths without waiting for each other.
    """

    args: Any  # transformers' own, for sequences

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> Any:
        """As transformers'. All ranks must call."""
        generates = self.args.predict_with_generate and not prediction_loss_only
        is_sharded = generates and isinstance(self.model, FullyShardedModule)
        if is_sharded:  # `generate` begins with the encoder, whose inputs nobody casts
            inputs = {key: value if self._is_label(key) else self._cast(value) for key, value in inputs.items()}
        with full_parameters(self.model) if is_sharded else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)

    def _cast(self, value: Any) -> Any:
        """Inputs in the dtype that the model computes in."""
        dtype = state_of(self.model, "prediction_step").param_dtype
        casts = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if casts else value
