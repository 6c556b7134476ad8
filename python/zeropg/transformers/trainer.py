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

from zeropg.accelerate.finite_steps import FiniteSteps
from zeropg.accelerate.sharded_accelerator import adopt
from zeropg.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from zeropg.deepspeed.checkpoints.load import load_deepspeed
from zeropg.deepspeed.config import optimizer_of, scheduler_of
from zeropg.deepspeed.engine import make_scaler
from zeropg.deepspeed.loss_scaler import LossScaler
from zeropg.deepspeed.make_optimizer import check_state_bits, make_optimizer
from zeropg.deepspeed.update import leaves_out_nonfinite
from zeropg.rank_io.agreement import check_same, together
from zeropg.sharding.access import full_parameters
from zeropg.sharding.sharded_class import FullyShardedModule
from zeropg.sharding.state import names_label
from zeropg.transformers.foreign import find_tag, load_schedule
from zeropg.transformers.sharding import ConfiguredSharding, sharding_of
from zeropg.transformers.weights import prompts_to_load, prompts_to_save, weights_to_save

_FOLDER = "zeropg"  # in a checkpoint of the Trainer: what `zeropg.save_checkpoint` wrote


class Trainer(transformers.Trainer):
    """Trains as transformers' Trainer does, with the model under `zeropg.fully_shard`, in any stage.

        trainer = zeropg.transformers.Trainer(model, args, train_dataset=data, zeropg={"stage": 3})
        trainer.train()

    Start one process per device by torchrun. All ranks must make it and call its methods alike, `save_model` too. The
    model is sharded in place when `train`, `evaluate` or `predict` is called first.

    - `bf16` and `fp16` mean that the model computes in that dtype and keeps fp32 masters. Floating inputs are cast to
      it, but for labels: arguments with "label" in their names, and those that `label_names` has.
    - A model that another Trainer has sharded trains on as it is, in a Trainer that asks for the same stage and dtype.
    - With gradient accumulation, stages 2 and 3 reduce at every micro-batch, so that gradients stay sharded.
    - A checkpoint has, beside the Trainer's own files, a folder of `zeropg.save_checkpoint`: training goes on from it
      at any world size and stage, and `load_best_model_at_end` takes the masters from it. It holds the whole model,
      also where the weights beside it are a PEFT model's adapters. Training also goes on from what transformers'
      Trainer has saved, under DeepSpeed too.
    - `save_model` writes what `from_pretrained` loads, in the dtype that the model computes in; rank 0 has it whole in
      host memory meanwhile.

    Args:
        *args, **kwargs: as transformers.Trainer's.
        zeropg: keyword arguments of `zeropg.fully_shard`; stage 3 by default. Instead `TrainingArguments.deepspeed` may
            hold DeepSpeed's configuration (that of zeropg.transformers.TrainingArguments does not need DeepSpeed). Its
            "auto" is filled as transformers does, and its `optimizer` and `scheduler` are used where it has them. A
            step whose gradients are not finite is left out, as DeepSpeed's engine does. A warning names its keys that
            do nothing here, such as monitors.

    Raises:
        ValueError: transformers counts other processes than the process group has, or several devices in one process;
            when the model is sharded: a batch norm would compute in another dtype than that of its running statistics,
            or the model is sharded already, in another stage or dtype.
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
        accelerator._zeropg_asked = self._sharding.asked
        accelerator._zeropg_is_label = self._is_label
        if isinstance(self._sharding, ConfiguredSharding):
            settings = self._sharding.settings
            if settings.fp16.enabled:
                accelerator.scaler = make_scaler(settings)
            elif leaves_out_nonfinite(settings):
                accelerator._zeropg_finite_steps = FiniteSteps()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """As transformers'; a model that is sharded already stays where it is."""
        if not isinstance(model, FullyShardedModule):
            super()._move_model_to_device(model, device)

    def _is_label(self, name: str) -> bool:
        return names_label(name) or name in self.label_names

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """As transformers'; autocast to bfloat16 where the configuration's `torch_autocast` asks for it."""
        if self._sharding.autocasts:
            return torch.autocast(self.args.device.type, torch.bfloat16, cache_enabled=cache_enabled)
        return super().autocast_smart_context_manager(cache_enabled)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As transformers'; the configuration's optimizer where it has one, over all trainable parameters.

        Raises ValueError where the configuration's `bf16_optimizer_states` asks for another optimizer,
        NotImplementedError where its Muon would step tensors of more than two dimensions.
        """
        if not isinstance(self._sharding, ConfiguredSharding):
            return super().create_optimizer(model)
        settings, module = self._sharding.settings, model or self.model
        if self.optimizer is None and (make := optimizer_of(settings)) is not None:
            self.optimizer = make_optimizer(make, module, [one for one in module.parameters() if one.requires_grad])
        made = super().create_optimizer(model)
        check_state_bits(made, settings, "Trainer")
        return made

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
        is_sharded = isinstance(self.model, FullyShardedModule)
        if is_sharded and self._saves_in_its_own_way():
            with full_parameters(self.model):
                if self.args.should_save:
                    super()._save(output_dir, state_dict)
            return
        if state_dict is None and is_sharded:
            state_dict = weights_to_save(self.model, rank0_only=not self.args.save_on_each_node)
        with prompts_to_save(self.model):
            super()._save(output_dir, state_dict)

    def _saves_in_its_own_way(self) -> bool:
        """Whether a class behind this one saves, which may read the model instead of a state dict."""
        behind = type(self).__mro__[type(self).__mro__.index(Trainer) + 1 :]
        return next(one for one in behind if "_save" in vars(one)) is not transformers.Trainer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(os.path.join(output_dir, _FOLDER), self.model, self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._held_by(resume_from_checkpoint):  # else with the optimizer, when the model is sharded
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        held = "" if checkpoint is None else self._held_by(checkpoint)
        if checkpoint is None or not held:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        saved_schedule = self._load_sharded(Path(checkpoint) / held, self.optimizer.optimizer)
        load_schedule(Path(checkpoint), self.lr_scheduler, saved_schedule)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None  # else transformers does not call
        if held := self._held_by(best):
            self._load_sharded(Path(best) / held, None)
        else:
            with prompts_to_load(self.model):
                super()._load_best_model()

    def _load_sharded(self, folder: Path, optimizer: Any) -> dict[str, Any]:
        """Sets model and optimizer from a folder that `_held_by` has named. Collective.

        Frozen parameters that DeepSpeed has not saved, as those under PEFT's adapters, keep their values. Returns what
        DeepSpeed's engine has saved of a scheduler.
        """
        if folder.name == _FOLDER:
            load_checkpoint(folder, self.model, optimizer)
            return {}
        contents = load_deepspeed(folder, self.model, optimizer, strict=not hasattr(self.model, "peft_config"))
        if optimizer is not None and isinstance(self.accelerator.scaler, LossScaler):
            self.accelerator.scaler.load_state_dict(contents.loss_scale)
        return contents.lr_scheduler

    def _held_by(self, checkpoint: str) -> str:
        """The folder of a checkpoint that has model and optimizer: ours, or a tag of DeepSpeed's; "": there is none.

        Collective; raises ValueError where ranks see different things.
        """
        sharding = self._sharding
        universal = isinstance(sharding, ConfiguredSharding) and sharding.settings.checkpoint.load_universal
        group = dist.distributed_c10d._get_default_group()
        what = f"the folder of weights and states in '{checkpoint}'"

        def look() -> dict[str, str]:
            path = Path(checkpoint)
            return {what: _FOLDER if (path / _FOLDER).is_dir() else find_tag(path, universal=universal)}

        seen = together(group, "Trainer", look)
        check_same(group, "Trainer", seen)
        return str(seen[0][what])


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
