"""`ShardedAccelerator`: an accelerator whose calls work on models that `zeropg.fully_shard` has sharded."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend, convert_outputs_to_fp32
from torch import nn

from zeropg.accelerate.finite_steps import FiniteSteps
from zeropg.accelerate.process_group import need_process_group
from zeropg.accelerate.saved_state import load_sharded, save_sharded
from zeropg.checkpoint.state_dict import full_state_dict
from zeropg.optim.grad_scaler import GradScaler
from zeropg.optim.shard_optimizer import ShardedOptimizer, shard_optimizer
from zeropg.sharding.access import clip_grad_norm_, full_gradients, no_sync
from zeropg.sharding.generation import let_generate
from zeropg.sharding.sharded_class import FullyShardedModule
from zeropg.sharding.state import ShardedState, check_sharded_as, names_label, state_of

Shard = Callable[..., Any]  # of a model, in place; takes param_dtype=

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Accelerate's other ways to shard, which would take the model first.
_OTHERS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class ShardedAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """Mixed into the class of an accelerator by `zeropg.accelerate.prepare`.

    What it changes, for sharded models alone:

    - `no_sync`, `accumulate`: in stages 2 and 3 each backward reduces, so that gradients stay sharded; in stages 0 and
      1 only the last one does;
    - `clip_grad_norm_`, `clip_grad_value_`: of the averaged gradient of the whole model. All ranks must call;
    - `get_state_dict`, `save_model`: whole weights, on the main process. All ranks must call;
    - `save_state`, `load_state`: models and optimizers by `zeropg.save_checkpoint`, which load at any world size. All
      ranks must call;
    - `scaler`: with mixed_precision="fp16" a `zeropg.GradScaler`, also on the CPU.
    """

    # Accelerate's own.
    scaler: Any
    _models: list[Any]
    _optimizers: list[Any]

    _zeropg_shard: Shard | None = None  # what `prepare` does with models; None: accelerate's own way
    _zeropg_asked: Mapping[str, Any] = {}  # what the program has said of it: stage, param_dtype
    _zeropg_is_label: Callable[[str], bool] = staticmethod(names_label)  # keyword arguments that keep their dtype
    _zeropg_finite_steps: FiniteSteps | None = None  # without a loss scale; None: every step is taken

    # --- prepare ---

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate's; models are sharded first, so that optimizers may stand before them."""
        if self._zeropg_shard is not None:
            for index, one in enumerate(args):
                if isinstance(one, nn.Module):
                    self.prepare_model(
                        one, device_placement=None if device_placement is None else device_placement[index]
                    )
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shards a model in place, for evaluation too; accelerate's own way outside of `zeropg.accelerate.prepare`.

        A model that is sharded already stays as it is. Raises ValueError where it is not so as the program says.
        """
        if self._zeropg_shard is not None and isinstance(model, FullyShardedModule):
            self._take_over(model)
        if self._zeropg_shard is None or getattr(model, "_is_accelerate_prepared", False):
            return cast(nn.Module, super().prepare_model(model, device_placement, evaluation_mode))
        if not isinstance(model, FullyShardedModule):
            places = self.device_placement if device_placement is None else device_placement
            if places and not any(parameter.is_meta for parameter in model.parameters()):
                model.to(self.device)
            self._shard(model)
        self._convert_outputs(model)
        self._compile(model)
        self._models.append(model)
        vars(model)["_is_accelerate_prepared"] = True
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Makes an optimizer over a sharded model step shards; others as accelerate does."""
        is_prepared = getattr(optimizer, "_is_accelerate_prepared", False)
        model = None if is_prepared else self._sharded_with(_parameters_of(optimizer), "prepare")
        if model is None:
            return cast(torch.optim.Optimizer, super().prepare_optimizer(optimizer, device_placement))
        sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else shard_optimizer(optimizer, model)
        scaler = self._zeropg_finite_steps if self.scaler is None else _StepsWithoutClosure(self.scaler)
        prepared = AcceleratedOptimizer(sharded, device_placement=False, scaler=scaler)
        prepared._is_accelerate_prepared = True
        self._optimizers.append(prepared)
        return cast(torch.optim.Optimizer, prepared)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As accelerate's, which knows a scheduler's optimizer by identity, while ours stands in for the user's own."""
        prepared = super().prepare_scheduler(scheduler)
        inner = getattr(getattr(prepared, "scheduler", None), "optimizer", None)
        own = [one for one in self._optimizers if getattr(one.optimizer, "_wrapped", None) is inner]
        if inner is not None and own:
            prepared.optimizers = own
        return prepared

    def _shard(self, model: nn.Module) -> None:
        assert self._zeropg_shard is not None  # as prepare_model says
        keywords = getattr(self._zeropg_shard, "keywords", {})
        default = {} if "param_dtype" in keywords else {"param_dtype": _DTYPES.get(self.mixed_precision)}
        self._zeropg_shard(model, **default)
        let_generate(model)
        self._serve(state_of(model, "accelerate.prepare"))

    def _take_over(self, model: nn.Module) -> None:
        """Of a model that another accelerator, or the program itself, has sharded."""
        dtype = _DTYPES.get(self.mixed_precision)
        asked = {} if dtype is None else {"param_dtype": dtype}
        asked |= {**getattr(self._zeropg_shard, "keywords", {}), **self._zeropg_asked}
        check_sharded_as(model, asked, "accelerate.prepare")
        self._serve(state_of(model, "accelerate.prepare"))

    def _serve(self, state: ShardedState) -> None:
        state.is_label = self._zeropg_is_label
        if self.mixed_precision == "fp16" and not isinstance(self.scaler, GradScaler):
            handler = self.scaler_handler
            self.scaler = GradScaler(**({} if handler is None else handler.to_kwargs()))

    def _convert_outputs(self, model: nn.Module) -> None:
        """As accelerate does in mixed precision; `unwrap_model(keep_fp32_wrapper=False)` takes it away."""
        if self.mixed_precision not in _DTYPES or "_original_forward" in vars(model):
            return
        forward = model.forward
        vars(model)["_original_forward"] = forward
        function = getattr(forward, "__func__", None)
        converted = convert_outputs_to_fp32(forward if function is None else function)
        vars(model)["forward"] = converted if function is None else MethodType(converted, model)

    def _compile(self, model: nn.Module) -> None:
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO:
            return
        if plugin.use_regional_compilation:
            raise NotImplementedError(
                "[zeropg] accelerate.prepare: regional compilation is not available; compile the blocks yourself "
                "(block.compile()) before prepare, and leave it out"
            )
        model.compile(**plugin.to_kwargs())

    # --- training ---

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As accelerate's. In stages 2 and 3 backwards reduce nevertheless: gradients stay sharded."""
        if not isinstance(model, FullyShardedModule):
            context: Any = super().no_sync(model)
        elif state_of(model, "no_sync").core.stage >= 2:
            context = contextlib.nullcontext()
        else:
            context = no_sync(model)
        with context:
            yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """As accelerate's; not available for sharded models, whose ranks have to run the same number of backwards."""
        if any(isinstance(one, FullyShardedModule) for one in joinables):
            raise NotImplementedError(
                "[zeropg] join_uneven_inputs: ranks of a sharded model run the same number of backwards; leave it out, "
                "and let the loaders give all ranks equally many batches (even_batches=True, or drop_last)"
            )
        return super().join_uneven_inputs(joinables, even_batches)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """As accelerate's, on the CPU too."""
        if not isinstance(self.scaler, GradScaler):
            super().unscale_gradients(optimizer)
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
            while isinstance(one, AcceleratedOptimizer):
                one = one.optimizer
            self.scaler.unscale_(one)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As `zeropg.clip_grad_norm_`, where `parameters` are those of a sharded model. All ranks must call.

        Returns None, and clips nothing, where the optimizer averages momenta (OneBitAdam), so that no rank knows the
        norm, and nothing is to be clipped (max_norm inf) or the optimizer clips to max_norm itself (`clip=`).

        Raises ValueError for a part of a sharded model's parameters, which has no norm of its own; RuntimeError for
        another max_norm than the `clip` of an optimizer that averages momenta.
        """
        parameters = _listed(parameters)
        model = self._sharded_with(parameters, "clip_grad_norm_")
        if model is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        given = {id(parameter) for parameter in parameters}
        own = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if missing := [name for key, name in own.items() if key not in given]:
            raise ValueError(
                f"[zeropg] clip_grad_norm_: {missing[0]!r} of the sharded {type(model).__name__} is not among the "
                "parameters; expected model.parameters(), since the norm is that of the whole model"
            )
        if not state_of(model, "clip_grad_norm_").core.averages_gradients and self._clip_themselves(model, max_norm):
            return None  # with what the step unscales itself
        self._unscale(model)
        norm = clip_grad_norm_(model, max_norm, norm_type)
        if self._zeropg_finite_steps is not None:
            self._zeropg_finite_steps.saw(model, norm)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As torch's on the averaged gradients. All ranks must call; each holds them whole meanwhile."""
        parameters = _listed(parameters)
        model = self._sharded_with(parameters, "clip_grad_value_")
        if model is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        self._unscale(model)
        with full_gradients(model):
            nn.utils.clip_grad_value_(parameters, clip_value)

    def _clip_themselves(self, model: nn.Module, max_norm: float) -> bool:
        """Whether the optimizers of a model, which average momenta, leave nothing to clip to max_norm."""
        clips = {getattr(one.optimizer._wrapped, "clip", None) for one in self._optimizers if _is_of(one, model)}
        return math.isinf(max_norm) or clips == {max_norm}

    def _unscale(self, model: nn.Module) -> None:
        if isinstance(self.scaler, GradScaler):
            own = [one for one in self._optimizers if getattr(one.optimizer, "_model", None) is model]
            self.unscale_gradients(own)

    def _sharded_with(self, parameters: Iterable[Any], call: str) -> nn.Module | None:
        """The sharded model that has these parameters; None: no sharded model has any. ValueError: some have."""
        ids = {id(parameter) for parameter in parameters}
        for model in self._sharded_models():
            own = {id(parameter) for parameter in model.parameters()}
            if not ids & own:
                continue
            if ids - own:
                raise ValueError(
                    f"[zeropg] {call}: some of the parameters belong to a sharded {type(model).__name__} and some do "
                    "not; expected those of one model: call it once for each model"
                )
            return model
        return None

    def _sharded_models(self) -> list[nn.Module]:
        return [model for model in self._models if isinstance(model, FullyShardedModule)]

    # --- files ---

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Returns whole weights from the masters, on the CPU; {} on all but the main process. All ranks must call."""
        if isinstance(model, FullyShardedModule):
            return full_state_dict(model)
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> Any:
        """As accelerate's; each sharded model and its optimizers go into a folder `zeropg_<number>` of the directory,
        by `zeropg.save_checkpoint`. All ranks must call.

        Raises NotImplementedError where hooks are registered, which would take whole weights.
        """
        self._refuse_hooks("save_state", self._save_model_state_pre_hook)
        step = self.step
        with self._unsharded_parts() as parts:
            location = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        save_sharded(Path(location), parts, {"step": step})
        return location

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """Loads what `save_state` wrote, also at another world size. All ranks must call."""
        self._refuse_hooks("load_state", self._load_model_state_pre_hook)
        directory = self._latest() if input_dir is None else os.path.expanduser(input_dir)
        with self._unsharded_parts() as parts:
            super().load_state(directory, load_kwargs, **load_model_func_kwargs)
        if parts:
            # A rank that did not exist at the save has no random states, among which accelerate keeps the step.
            self.step = load_sharded(Path(directory), parts)["step"]

    @contextlib.contextmanager
    def _unsharded_parts(self) -> Iterator[list[tuple[nn.Module, list[ShardedOptimizer]]]]:
        """Takes sharded models and their optimizers out of accelerate's lists for a while, and gives them."""
        models, optimizers = self._models, self._optimizers
        parts: list[tuple[nn.Module, list[ShardedOptimizer]]] = []
        for model in self._sharded_models():
            parts.append((model, [one.optimizer for one in optimizers if _is_of(one, model)]))
        self._models = [one for one in models if not isinstance(one, FullyShardedModule)]
        self._optimizers = [one for one in optimizers if not isinstance(one.optimizer, ShardedOptimizer)]
        try:
            yield parts
        finally:
            self._models, self._optimizers = models, optimizers

    def _latest(self) -> str:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError(
                "[zeropg] load_state: there is no input_dir, and automatic_checkpoint_naming is off; expected one of "
                "the two"
            )
        root = Path(self.project_dir) / "checkpoints"
        return str(max(root.iterdir(), key=lambda folder: int(folder.name.rpartition("_")[2])))

    def _refuse_hooks(self, call: str, hooks: Any) -> None:
        if hooks and self._sharded_models():
            raise NotImplementedError(
                f"[zeropg] {call}: hooks that are registered for it get whole weights, which a sharded model has not; "
                "remove them, and save what they write by accelerator.get_state_dict(model)"
            )


class _StepsWithoutClosure:
    """A loss scale as accelerate's optimizers call it: with a closure, which is None."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.update = scaler.update

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        return self._scaler.step(optimizer, *([] if closure is None else [closure]))


def adopt(accelerator: Accelerator) -> ShardedAccelerator:
    """Makes an accelerator a `ShardedAccelerator`, in place, and returns it; a second call changes nothing.

    Raises NotImplementedError where accelerate shards by itself, ValueError where it counts other processes than the
    process group has.
    """
    if accelerator.distributed_type in _OTHERS or accelerator.parallelism_config is not None:
        raise NotImplementedError(
            f"[zeropg] accelerate.prepare: this accelerator is set up for {accelerator.distributed_type}, which shards "
            "or places models by itself; make it without that plugin (accelerate config, ACCELERATE_USE_...)"
        )
    if accelerator.mixed_precision == "fp8":
        raise NotImplementedError('[zeropg] accelerate.prepare: fp8 is not available; use mixed_precision="bf16"')
    need_process_group(accelerator.num_processes, "accelerate.prepare")
    if not isinstance(accelerator, ShardedAccelerator):
        cls = type(accelerator)
        accelerator.__class__ = type(cls.__name__, (ShardedAccelerator, cls), {"__module__": cls.__module__})
    return cast(ShardedAccelerator, accelerator)


@contextlib.contextmanager
def sharding_models(accelerator: Accelerator, shard: Shard) -> Iterator[None]:
    """Makes `accelerator.prepare` shard models by `shard` inside the `with`."""
    adopted = adopt(accelerator)
    before = adopted._zeropg_shard
    adopted._zeropg_shard = shard
    try:
        yield
    finally:
        adopted._zeropg_shard = before


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_of(optimizer: Any, model: nn.Module) -> bool:
    inner = optimizer.optimizer
    return isinstance(inner, ShardedOptimizer) and inner._model is model
