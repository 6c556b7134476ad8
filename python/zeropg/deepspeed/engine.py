"""`DeepSpeedEngine`: DeepSpeed's training calls over a model that `fully_shard` has sharded."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, Sampler

from zeropg.deepspeed.accumulation import Accumulation
from zeropg.deepspeed.casts import CastEngine
from zeropg.deepspeed.config import Config
from zeropg.deepspeed.configured import ConfiguredEngine
from zeropg.deepspeed.dataloader import DeepSpeedDataLoader
from zeropg.deepspeed.engine_checkpoints import EngineCheckpoints
from zeropg.deepspeed.engine_optimizer import EngineOptimizer
from zeropg.deepspeed.loss_scaler import LossScaler
from zeropg.deepspeed.monitor import make_monitor
from zeropg.deepspeed.observation.make import make_observers
from zeropg.deepspeed.observation.observer import Facts
from zeropg.deepspeed.place import PlacedEngine
from zeropg.deepspeed.scaled_backward import (
    Scaling,
    divided_by_engine,
    mark_scaled,
    scaling_by_engine,
    scaling_by_hand,
)
from zeropg.deepspeed.settings import EngineSettings
from zeropg.deepspeed.state_offload import StateOffload, is_to_host, states_of
from zeropg.deepspeed.tensor_parallel.ranks import TENSORS
from zeropg.deepspeed.tensor_parallel.same_inputs import SameInputs
from zeropg.deepspeed.unavailable import UNAVAILABLE
from zeropg.deepspeed.update import Update, leaves_out_nonfinite
from zeropg.sharding.nested import hidden_tensors_in, tensors_in
from zeropg.sharding.state import state_of
from zeropg.tensor_parallel.distributed import is_distributed

LOGGER = logging.getLogger("zeropg")
# Words of torch where it does not mix two dtypes; those of two shapes also say "but got".
_DTYPES_DIFFER = re.compile(
    r"same dtype|expected scalar type|should be the same|"
    r"but (got|found) (Float|Double|Half|BFloat16|float|double|c10::)"
)


class DeepSpeedEngine(EngineSettings, ConfiguredEngine, PlacedEngine, CastEngine, EngineCheckpoints, nn.Module):
    """What `initialize` returns first. All ranks must call forward, backward and step alike.

    `module` is the user's model, sharded in place. Attributes that the engine has not are the model's.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        *,
        raw_config: dict[str, Any],
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        device: torch.device,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Takes parts that `initialize` has made: a sharded module, and an optimizer from `shard_optimizer`.

        mesh: (ranks with data of their own, ranks that share layers), where layers are cut over ranks.
        """
        nn.Module.__init__(self)
        self.module = module
        self.optimizer = optimizer
        self._is_destroyed = False
        self.lr_scheduler = lr_scheduler
        self.is_compiled = False
        self.training_dataloader: DeepSpeedDataLoader | None = None
        self.config = raw_config
        self.collate_fn = collate_fn
        self.device = device
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._config = config
        self._state = state_of(module, "initialize")
        self._state.casts_inputs = config.fp16.auto_cast
        self._group: dist.ProcessGroup = self._state.core.process_group
        self.global_rank = dist.get_rank()
        self._everybody: dist.ProcessGroup = self._state.parallel.everybody
        self._mesh = mesh
        self._same_inputs: SameInputs | None = None
        if mesh is not None:
            self._same_inputs = SameInputs(module, self._everybody, mesh.get_group(TENSORS), device)
        self.world_size, self.dp_world_size = self._everybody.size(), self._group.size()
        assert config.train_micro_batch_size_per_gpu and config.gradient_accumulation_steps  # `read` fills them in
        self._accumulation = Accumulation(
            micro_batch_size=config.train_micro_batch_size_per_gpu,
            steps=config.gradient_accumulation_steps,
            world_size=self._group.size(),
            is_managed=config.managed_gradient_accumulation,
        )
        self._scaler = make_scaler(config)
        skips = leaves_out_nonfinite(config)
        self._update: Update | None = None
        if isinstance(optimizer, EngineOptimizer):
            optimizer.loss_scaler = self._scaler
        if optimizer is not None:
            sharing = None if mesh is None else mesh.get_group(TENSORS)
            self._update = Update(module, optimizer, self._scaler, config.gradient_clipping, skips, sharing)
        self.monitor = make_monitor(config, self._everybody)
        self._observers = make_observers(config, module, self._state.core, device, self.monitor)
        self._state_offload = StateOffload(self._state.core, optimizer, moves=device.type != "cpu")
        self._step_applied = False
        self._in_no_sync = False
        self._backwards = 0  # since the last update
        self._loss: torch.Tensor | None = None  # what engine.backward was given since then, each divided
        # Whether losses since the last update were divided by the accumulation steps: by engine.backward. Else the sum
        # of the gradients is, at the update.
        self._is_divided: bool | None = None  # None: there was no backward
        self._follow_boundary()

    def __getattr__(self, name: str) -> Any:
        """The engine's own, or the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            if name not in UNAVAILABLE:
                raise
        raise AttributeError(f"[zeropg] engine.{name} is not available: {UNAVAILABLE[name]}")

    @property
    def micro_steps(self) -> int:
        """Calls of step()."""
        return self._accumulation.micro_steps

    @property
    def cur_scale(self) -> float:
        """What losses are multiplied by now; 1 without fp16."""
        return self._scaler.cur_scale

    # --- forward and backward ---

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the model.

        Ranks that share layers (tensor_parallel) have to give it the same inputs: a ValueError otherwise, but under
        torch.no_grad.

        Where a program runs the backward itself, the sum of its gradients is divided by the accumulation steps in
        `step`, at a boundary. Inputs keep their dtype, as in DeepSpeed, unless `fp16.auto_cast` is true: labels and
        masks must not be rounded. A model of 16 bits that refuses inputs of another dtype gets them cast from then on,
        all of them, with a warning.
        """
        if self._same_inputs is not None and torch.is_grad_enabled():  # caches of decoding are each rank's own
            self._same_inputs.check((inputs, kwargs))
        with self._observers.during("forward", (*inputs, *kwargs.values())), self._autocast():
            try:
                output = self.module(*inputs, **kwargs)
            except RuntimeError as error:
                if not self._may_cast(error, (inputs, kwargs)):
                    raise
                output = self._call_with_cast_inputs(error, inputs, kwargs)
        if torch.is_grad_enabled() and (self.gradient_accumulation_steps() > 1 or self._scaler.is_enabled()):
            for tensor in [*tensors_in(output), *hidden_tensors_in(output)]:
                if tensor.requires_grad:
                    tensor.register_hook(self._check_backward)
        return output

    def _may_cast(self, error: RuntimeError, inputs: Any) -> bool:
        """Whether a forward has failed for the dtype of floating inputs that nobody has cast."""
        dtype = self._state.param_dtype
        if dtype is None or self._state.casts_inputs or not _DTYPES_DIFFER.search(str(error)):
            return False
        return any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors_in(inputs))

    def _call_with_cast_inputs(self, error: RuntimeError, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inputs are cast from now on, unless the model refuses them cast, too."""
        self._state.casts_inputs = True
        try:
            output = self.module(*inputs, **kwargs)
        except BaseException:
            self._state.casts_inputs = False
            raise
        if self._everybody.rank() == 0:
            LOGGER.warning(
                "[zeropg] forward: the model computes in %s and refuses inputs of another dtype (%s); all floating "
                "inputs are cast from now on, labels and masks too. To keep those, cast the others yourself, as for "
                "DeepSpeed.",
                self._state.param_dtype,
                str(error).splitlines()[0],
            )
        return output

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.torch_autocast_enabled():
            return nullcontext()  # which leaves the program's own as it is
        return torch.autocast(self.device.type, self.torch_autocast_dtype())

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Runs the backward of a loss, which is divided by the accumulation steps and multiplied by the loss scale.

        Args:
            loss: a scalar, the mean over this rank's micro-batch.
            retain_graph: as torch's.
            scale_wrt_gas: False: `loss` is divided already.

        Returns:
            The loss divided by the accumulation steps, without the loss scale.

        Raises:
            RuntimeError: the engine has no optimizer.
            ValueError: `loss` is no scalar with a graph.
        """
        self._need_optimizer("backward")
        _check_loss(loss, "backward")
        steps = self.gradient_accumulation_steps()
        divided = loss / steps if scale_wrt_gas else loss
        if self._is_divided is None:
            self._is_divided = True
        total = self._scaler.scale(divided if self._is_divided else divided * steps)
        # A tensor of its own carries the mark: hooks of the model's outputs come after it.
        marked = total.view_as(total)
        scaling = Scaling(self.cur_scale, steps)
        with self._observers.during("backward"), divided_by_engine(marked, scaling):
            marked.backward(retain_graph=retain_graph)
        self._backwards += 1
        if self.monitor.enabled:
            own = divided.detach().float()
            self._loss = own if self._loss is None else self._loss + own
        return divided

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns `loss` times the loss scale, for `engine.scale(loss).backward()`. Raises as `backward` does."""
        self._need_optimizer("scale")
        _check_loss(loss, "scale")
        return mark_scaled(loss * self.cur_scale, self.cur_scale)

    @property
    def gradient_factor(self) -> float:
        """What the gradients that are accumulated now have yet to be multiplied by, beside the loss scale."""
        return 1.0 if self._is_divided else 1.0 / self.gradient_accumulation_steps()

    def _check_backward(self, gradient: torch.Tensor) -> None:
        """Hook of the model's outputs: how the loss of a backward through them is scaled."""
        if not self._state.core.will_accumulate():
            return  # torch.autograd.grad, of what may be no loss
        own = Scaling(self.cur_scale, self.gradient_accumulation_steps())
        if (scaling := scaling_by_engine()) is not None:
            if scaling != own:
                raise RuntimeError(
                    f"[zeropg] backward: another engine scaled this loss by {scaling.scale:g} and divided it by "
                    f"{scaling.steps}; this one has a loss scale of {own.scale:g} and {own.steps} micro-batches. Give "
                    "engines that share a loss one configuration, or call backward for each one's own loss"
                )
            if self._is_divided is None:
                self._is_divided = True
            return
        by_hand = scaling_by_hand()
        if self._scaler.is_enabled() and (by_hand is None or by_hand.scale != own.scale):
            raise RuntimeError(
                "[zeropg] backward: fp16 needs a loss scaled by this engine, and this one was not; call "
                "engine.backward(loss) or engine.scale(loss).backward()"
            )
        if self._is_divided:
            raise RuntimeError(
                "[zeropg] backward: the program runs this backward itself, but an earlier one since the last update "
                "was engine.backward; run all backwards of an update in one of the two ways"
            )
        self._is_divided = False

    # --- accumulation ---

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step() updates the model."""
        return self._accumulation.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says what is_gradient_accumulation_boundary() answers from now on; call it before the backward.

        All ranks must say the same. Raises RuntimeError with managed_gradient_accumulation=False, where every step()
        is a boundary.
        """
        if not self._accumulation.is_managed:
            raise RuntimeError(
                "[zeropg] set_gradient_accumulation_boundary: the configuration has managed_gradient_accumulation="
                "false, so every step() is a boundary; leave the call out"
            )
        self._accumulation.override = bool(is_boundary)
        self._follow_boundary()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates without communication inside the `with`, in every stage; step() is not allowed there.

        In stages 2 and 3 each rank holds whole gradients meanwhile (DeepSpeed refuses those stages). The next backward
        after it reduces the sum.
        """
        with self._without_reduction("no_sync"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduces the gradients of all backwards inside the `with` once, when it ends. All ranks must enter and leave.

        In every stage (DeepSpeed refuses stage 0); step() is not allowed there. Each rank holds whole gradients
        meanwhile. Inside an accumulation stages 0 and 1 reduce at its boundary, as always. After an exception nothing
        is reduced: call zero_grad, or run another backward.
        """
        with self._without_reduction("coalesce_grad_reduction"):
            yield
        if self._state.core.synchronizes:
            self._state.core.reduce_accumulated()

    @contextmanager
    def _without_reduction(self, call: str) -> Iterator[None]:
        if self._in_no_sync:
            raise RuntimeError(
                f"[zeropg] {call}: called inside no_sync or coalesce_grad_reduction; leave the inner one out"
            )
        self._in_no_sync = True
        self._follow_boundary()
        try:
            yield
        finally:
            self._in_no_sync = False
            self._follow_boundary()

    def _follow_boundary(self) -> None:
        """Tells the model whether its next backward communicates.

        In stages 0 and 1 gradients are whole anyway until the boundary; from stage 2 on each backward reduces, so that
        only shards are kept.
        """
        core = self._state.core
        is_last = core.stage >= 2 or not self._accumulation.is_managed or self._accumulation.is_boundary
        core.set_synchronize(is_last and not self._in_no_sync)

    def _begin_accumulation(self) -> None:
        """After a load: the next micro-batch is a batch's first."""
        self._begin_accumulation_at(self.global_steps * self._accumulation.steps)

    def _begin_accumulation_at(self, micro_steps: int) -> None:
        self._accumulation.begin(micro_steps)
        self._backwards = 0
        self._loss = None
        self._is_divided = None
        self._follow_boundary()

    # --- step ---

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch; at a boundary clips, updates the model and steps the scheduler. All ranks must call.

        An update whose gradients are not finite is left out (`skipped_steps`), and the scheduler stays where it is.

        Args:
            lr_kwargs: for the scheduler's step().

        Raises:
            RuntimeError: without an optimizer, inside no_sync, or without a backward since the last update.
        """
        self._need_optimizer("step")
        if self._in_no_sync:
            raise RuntimeError(
                "[zeropg] step: called inside engine.no_sync() or engine.coalesce_grad_reduction(); call it after the "
                "`with`"
            )
        self._step_applied = False
        is_boundary, samples = self._accumulation.is_boundary, self.global_samples
        with self._observers.during("step"):
            if is_boundary:
                self._take_model_step(lr_kwargs)
            self._accumulation.micro_steps += 1
            self._follow_boundary()
        if is_boundary:
            self._tell_observers(self.global_samples - samples)

    def was_step_applied(self) -> bool:
        """Whether the last step() updated the model: False between boundaries and after an overflow."""
        return self._step_applied

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Returns the 2-norm of the last update's averaged gradients, before clipping; a scalar, None before."""
        return self._update.norm if self._update else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, accumulated ones too."""
        self.module.zero_grad(set_to_none=set_to_none)
        self._loss = None
        self._is_divided = None

    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        assert self._update is not None  # as _need_optimizer says
        self._state_offload.check_loaded("step")
        try:
            self._step_applied = self._update.run(self.gradient_factor)
            if self._step_applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        except BaseException:
            self._begin_accumulation_at(self.micro_steps)  # the gradients are gone
            raise
        self._is_divided = None
        if isinstance(self.optimizer, EngineOptimizer):
            self.optimizer.overflow = not self._step_applied
        if not self._step_applied:
            self.skipped_steps += 1
        self.global_steps += 1
        forwards = self.gradient_accumulation_steps() if self._accumulation.is_managed else self._backwards
        self._backwards = 0
        self.global_samples += forwards * self.train_micro_batch_size_per_gpu() * self.dp_world_size

    def _tell_observers(self, samples: int) -> None:
        micro_batch = self.train_micro_batch_size_per_gpu()
        counts = (self.global_steps, self.skipped_steps, samples, micro_batch)
        scale = self.cur_scale if self._scaler.is_enabled() else None
        loss, self._loss = self._loss, None
        self._observers.updated(Facts(*counts, self.get_lr(), self.get_mom(), self.global_samples, loss, scale))

    # --- states elsewhere between steps ---

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str | torch.device = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states to host memory until `reload_states`, to use the device for something else. All ranks must call.

        What is away is out of reach: a forward without parameters, and an update without anything, raises an error. On
        a CPU model nothing moves, which is said once; errors are the same.

        Args:
            include: of OffloadStateTypeEnum, or their names: "optim_states", "hp_params" (masters that are apart from
                the parameters: those of 16-bit ones), "lp_params", "lp_grads", "contiguous_grad_buffer" (freed).
                Default: all. What offload_optimizer keeps elsewhere stays there.
            device: "cpu"; with "none" nothing happens.
            pin_memory: whether the host memory is page-locked.
            non_blocking: whether copies may go on when this returns.

        Raises:
            ValueError: another device, or an unknown name in `include`.
            RuntimeError: inside full_parameters, or gradients are to move while `.grad` shows them whole (stages 0 and
                1) or they wait for a backward outside of no_sync. Nothing has moved then.
        """
        states = states_of(include)
        if is_to_host(device):
            self._state_offload.offload(states, pin_memory=pin_memory, non_blocking=non_blocking)
        elif self.global_rank == 0:
            LOGGER.warning("[zeropg] offload_states: device is 'none', so everything stays")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back all that `offload_states` has moved, to the last bit. Does not communicate."""
        self._state_offload.reload(self.device, non_blocking=non_blocking)

    # --- the rest ---

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each param group; [] without an optimizer."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []

    def get_mom(self) -> list[Any]:
        """Returns the momentum, or the betas, of each param group."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        """Returns the `type` of each param group; 0.0 for one that has none, as DeepSpeed does."""
        return [group.get("type", 0.0) for group in self.optimizer.param_groups] if self.optimizer else []

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtypes of the model's parameters, and of their accumulated gradients."""
        trained = [group for group in self._state.core.flat_groups if group.is_trainable]
        if not trained:
            return self._state.param_dtype or torch.float32, torch.float32
        _, parameter, _, _ = trained[0].slots[0]
        return self._state.param_dtype or parameter.dtype, trained[0].master_dtype

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """As nn.Module's."""
        super().train(mode)
        return self

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the model by torch.compile. Raises NotImplementedError for a schedule, for compiled autograd, and
        where an embedding is cut over ranks."""
        if schedule is not None or compiled_autograd_enabled:
            raise NotImplementedError(
                "[zeropg] compile: DeepCompile's schedule and compiled autograd are not available; call "
                "engine.compile(backend=..., compile_kwargs=...)"
            )
        if any(isinstance(module, nn.Embedding) and is_distributed(module.weight) for module in self.module.modules()):
            raise NotImplementedError(
                "[zeropg] compile: an embedding is cut over ranks (tensor_parallel), which torch does not compile; "
                'leave it whole by partition_config: {"use_default_specs": true, "layer_specs": '
                '[{"patterns": [".*embed"], "partition_type": "skip"}]}'
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Makes a loader of this rank's share of a dataset.

        Args:
            batch_size: default: the micro-batch size.
            route: "train" shuffles; "eval" and "predict" do not.
            num_local_io_workers: processes that load; default: none, this one loads.
        """
        has_index = not isinstance(dataset, torch.utils.data.IterableDataset)
        if data_sampler is None and has_index and route in ("eval", "predict"):
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, num_replicas=self._group.size(), rank=self._group.rank(), shuffle=False
            )
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            rank=self._group.rank(),
            world_size=self._group.size(),
            data_sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory,
            drop_last=self.dataloader_drop_last(),
        )

    def destroy(self) -> None:
        """Lets go of the optimizer; the model stays sharded and can be read and saved."""
        self.optimizer = self.lr_scheduler = self._update = None
        self._is_destroyed = True

    def _need_optimizer(self, call: str) -> None:
        if self._is_destroyed:
            raise RuntimeError(f"[zeropg] {call}: this engine was destroyed, and its optimizer is gone; make another")
        if self.optimizer is None:
            raise RuntimeError(
                f"[zeropg] {call}: this engine has no optimizer; give initialize(optimizer=), or the configuration an "
                "`optimizer` block"
            )


def make_scaler(config: Config) -> LossScaler:
    """Returns the loss scale that the configuration describes; one that does nothing without fp16."""
    fp16 = config.fp16
    is_dynamic = fp16.loss_scale == 0
    return LossScaler(
        scale=2.0**fp16.initial_scale_power if is_dynamic else fp16.loss_scale,
        is_dynamic=is_dynamic,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        min_scale=fp16.min_loss_scale,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        enabled=fp16.enabled,
    )


def _check_loss(loss: Any, call: str) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            what += " without a graph"
        raise ValueError(
            f"[zeropg] {call}: the loss is {what}; expected a scalar tensor that requires grad. For other outputs call "
            "their own backward(gradient)"
        )
