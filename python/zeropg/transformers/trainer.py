"""`Trainer`: transformers' Trainer, with the model, its gradients and its optimizer sharded by zeropg."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.trainer import SCHEDULER_NAME

from zeropg.accelerate.sharded_accelerator import adopt
from zeropg.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from zeropg.deepspeed.config import optimizer_of, scheduler_of
from zeropg.deepspeed.engine import make_scaler
from zeropg.rank_io.agreement import check_same, together
from zeropg.sharding.fully_shard import FullyShardedModule
from zeropg.sharding.state import names_label
from zeropg.transformers.sharding import ConfiguredSharding, sharding_of
from zeropg.transformers.weights import weights_to_save

_FOLDER = "zeropg"  # in a checkpoint of the Trainer: what `zeropg.save_checkpoint` wrote


class Trainer(transformers.Trainer):
    """Trains as transformers' Trainer does, with the model under `zeropg.fully_shard`, in any stage.

        trainer = zeropg.transformers.Trainer(model, args, train_dataset=data, zeropg={"stage": 3})
        trainer.train()

    Start one process per device by torchrun. All ranks must make it and call its methods alike, `save_model` too. The
    model is sharded in place when `train`, `evaluate` or `predict` is called first.

    - `bf16` and `fp16` mean that the model computes in that dtype and keeps fp32 masters. Floating inputs are cast to
      it, but for labels: arguments with "label" in their names, and those that `label_names` has.
    - With gradient accumulation, stages 2 and 3 reduce at every micro-batch, so that gradients stay sharded.
    - A checkpoint has, beside the Trainer's own files, a folder of `zeropg.save_checkpoint`: training goes on from it
      at any world size and stage, and `load_best_model_at_end` takes the masters from it. It holds the whole model,
      also where the weights beside it are a PEFT model's adapters.
    - `save_model` writes what `from_pretrained` loads, in the dtype that the model computes in; rank 0 has it whole in
      host memory meanwhile.

    Args:
        *args, **kwargs: as transformers.Trainer's.
        zeropg: keyword arguments of `zeropg.fully_shard`; stage 3 by default. Instead `TrainingArguments.deepspeed` may
            hold DeepSpeed's configuration (that of zeropg.transformers.TrainingArguments does not need DeepSpeed). Its
            "auto" is filled as transformers does, and its `optimizer` and `scheduler` are used where it has them.

    Raises:
        ValueError: transformers counts other processes than the process group has, or several devices in one process;
            when the model is sharded: a batch norm would compute in another dtype than that of its running statistics.
        TypeError, zeropg.deepspeed.config.ConfigError: what is said about sharding cannot be used.
        NotImplementedError: an argument does not go with sharded models; the message says what to use instead.
    """

    # transformers' own, as they are when a method of this class is called.
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, zeropg: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._zeropg_options = zeropg
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers'; the accelerator shards what it prepares."""
        _check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        accelerator = adopt(self.accelerator)
        self._sharding = sharding_of(self._zeropg_options, self.args, self.model)
        accelerator._zeropg_shard = self._sharding.shard
        accelerator._zeropg_is_label = self._is_label
        if isinstance(self._sharding, ConfiguredSharding) and self._sharding.settings.fp16.enabled:
            accelerator.scaler = make_scaler(self._sharding.settings)

    def _is_label(self, name: str) -> bool:
        return names_label(name) or name in self.label_names

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As transformers'; the configuration's optimizer where it has one, over all trainable parameters."""
        make = optimizer_of(self._sharding.settings) if isinstance(self._sharding, ConfiguredSharding) else None
        if self.optimizer is None and make is not None:
            self.optimizer = make([one for one in (model or self.model).parameters() if one.requires_grad])
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """As transformers'; the configuration's scheduler where it has one."""
        if self.lr_scheduler is None and isinstance(self._sharding, ConfiguredSharding):
            make = scheduler_of(self._sharding.with_schedule(num_training_steps))
            if make is not None:
                self.lr_scheduler = make(optimizer or self.optimizer)
                self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    # --- files ---

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and isinstance(self.model, FullyShardedModule):
            state_dict = weights_to_save(self.model, rank0_only=not self.args.save_on_each_node)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(os.path.join(output_dir, _FOLDER), self.model, self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not _has_folder(resume_from_checkpoint):  # else with the optimizer, when the model is sharded
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _has_folder(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_checkpoint(Path(checkpoint) / _FOLDER, self.model, self.optimizer.optimizer)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None  # else transformers does not call
        if not _has_folder(best):
            super()._load_best_model()
            return
        load_checkpoint(Path(best) / _FOLDER, self.model)


def _has_folder(checkpoint: str) -> bool:
    """Whether a checkpoint holds one of zeropg's. Collective; raises ValueError where ranks see different things."""
    group = dist.distributed_c10d._get_default_group()
    what = f"a folder '{_FOLDER}' in '{checkpoint}'"
    seen = together(group, "Trainer", lambda: {what: str((Path(checkpoint) / _FOLDER).is_dir())})
    check_same(group, "Trainer", seen)
    return bool(seen[0][what] == "True")


def _check_arguments(args: transformers.TrainingArguments) -> None:
    refused = {
        "auto_find_batch_size": "ranks that run out of memory alone would part from the others; set the batch size",
        "bf16_full_eval": "it casts sharded parameters; use bf16=True, which computes in bf16 in evaluation too",
        "fp16_full_eval": "it casts sharded parameters; use fp16=True, which computes in fp16 in evaluation too",
        "fsdp": "it shards by torch's FSDP; use zeropg={'stage': 3} without it",
    }
    for name, reason in refused.items():
        if getattr(args, name, None):
            raise NotImplementedError(f"[zeropg] Trainer: TrainingArguments({name}=) is not available: {reason}")
    if getattr(args, "deepspeed_plugin", None) is not None:
        raise NotImplementedError(
            "[zeropg] Trainer: these TrainingArguments have set up the package deepspeed; make "
            "zeropg.transformers.TrainingArguments(deepspeed=...) instead, which keep the configuration for zeropg"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"[zeropg] Trainer: one process sees {args.n_gpu} devices, expected one; start a process per device: "
            "torchrun --nproc-per-node"
        )
