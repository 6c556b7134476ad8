"""`ZeroPGStrategy`: Lightning's Trainer with models that `zeropg.fully_shard` has sharded."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from zeropg.checkpoint.state_dict import full_optimizer_state_dict, full_state_dict
from zeropg.lightning.callbacks import check_callbacks
from zeropg.lightning.layers import compute_layers_in
from zeropg.lightning.precision import ShardedPrecision, sharded_precision
from zeropg.optim.shard_optimizer import ShardedOptimizer, shard_optimizer
from zeropg.sharding.access import no_sync
from zeropg.sharding.fully_shard import fully_shard
from zeropg.sharding.sharded_class import FullyShardedModule
from zeropg.sharding.state import check_sharded_as, names_label, state_of


class ZeroPGStrategy(DDPStrategy):
    """Shards the LightningModule in place, over the ranks that Lightning starts (or torchrun).

        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=ZeroPGStrategy(stage=3))

    - `precision`: "32-true", or "bf16-mixed": layers compute in bf16 with fp32 masters, and the rest of a step under
      autocast. Steps get their batch as it is; layers, and the module where a step calls it, cast floating inputs.
    - `sync_batchnorm`: as under DDP, before the model is sharded.
    - Manual optimization in stage 3: the step calls layers by the module itself (`self(x)`) or as units, since it is no
      forward of its own; then any number of backwards and optimizer steps may follow.
    - `gradient_clip_val`: of the averaged gradient of the whole model; by value, too.
    - `accumulate_grad_batches`: stages 2 and 3 reduce at every micro-batch, so that gradients stay sharded.
    - Checkpoints are Lightning's own, one file with whole weights and optimizer states: they load at any world size and
      stage, and under other strategies. Rank 0 has them whole in host memory meanwhile. `zeropg.save_checkpoint` in a
      callback writes shards in parallel.
    - The module stays sharded after `fit`; a Trainer with another strategy, stage or precision needs a new one.

    Args:
        stage: what is sharded, as `zeropg.fully_shard` has it.
        process_group_backend: for init_process_group, where there is no group yet.
        timeout: of the group's operations.
        options: further keyword arguments of `zeropg.fully_shard`. param_dtype goes before `precision`.

    Raises NotImplementedError for another precision, and in stage 3 for callbacks that average weights or unfreeze
    parts (BaseFinetuning). Raises ValueError for a module that is sharded already in another stage or dtype, or where a
    batch norm would compute in another dtype than that of its running statistics, or is to synchronize in a module that
    is sharded already.
    """

    strategy_name = "zeropg"

    def __init__(
        self,
        *,
        stage: int = 3,
        process_group_backend: str = "zeropg",
        timeout: timedelta = timedelta(minutes=30),
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._options = {"stage": stage, **options}

    @property
    def precision_plugin(self) -> Precision:
        """A `ShardedPrecision`."""
        return sharded_precision(self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else sharded_precision(precision_plugin)

    # --- set-up ---

    def setup(self, trainer: Any) -> None:
        """As Lightning's general strategy: the model is sharded for evaluation, too, as are batch norms made one."""
        assert self.model is not None  # as Lightning has connected it
        check_callbacks(trainer.callbacks, self._options["stage"])
        if self._layer_sync is not None and not isinstance(self.model, FullyShardedModule):
            self.model = cast(Any, self._layer_sync.apply(self.model))
        elif self._layer_sync is not None and any(map(_is_plain_batch_norm, self.model.modules())):
            raise ValueError(
                "[zeropg] ZeroPGStrategy: sync_batchnorm=True, but the module is sharded already, with batch norms of "
                "another Trainer's that do not synchronize; expected a new module"
            )
        super(DDPStrategy, self).setup(trainer)

    def model_to_device(self) -> None:
        if not isinstance(self.model, FullyShardedModule):
            super().model_to_device()

    def _setup_model(self, model: nn.Module) -> Any:
        precision = cast(ShardedPrecision, self.precision_plugin)
        options = {"param_dtype": precision.param_dtype, **self._options}
        if isinstance(model, FullyShardedModule):
            check_sharded_as(model, options, "ZeroPGStrategy")
        else:
            fully_shard(model, **options)
            state = state_of(model, "ZeroPGStrategy")
            state.is_label = names_label
            if state.param_dtype is not None:
                compute_layers_in(state.param_dtype, model)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        assert self.model is not None  # as setup says
        self.optimizers = [shard_optimizer(_unwrapped(one), self.model) for one in self.optimizers]

    def teardown(self) -> None:
        """Leaves the model sharded, where it is."""
        assert self.cluster_environment is not None and self.accelerator is not None  # as set-up has made them
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # --- steps: as calls of the module, so that its parameters are whole ---

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """In stage 3 a step that calls optimizers itself is no forward: its calls of the module are, one by one."""
        assert isinstance(self.model, FullyShardedModule) and self.lightning_module is not None  # as setup says
        is_forward = self.lightning_module.automatic_optimization or self.model._zeropg_state.core.stage < 3
        with self.precision_plugin.train_step_context():
            return self._call("training_step", args, kwargs, is_forward=is_forward)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._call("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._call("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._call("predict_step", args, kwargs)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_forward: bool = True) -> Any:
        assert self.model is not None and self.lightning_module is not None  # as setup says
        state, index = vars(self.model)["_zeropg_unit"]
        step = getattr(self.lightning_module, name)
        is_low = state.param_dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(self.root_device.type, dtype=state.param_dtype) if is_low else nullcontext():
            if is_forward:
                return state.run(index, step, args, kwargs, casts_inputs=False)
            return step(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Lightning's, which takes means of integers too; zeropg's groups do not, as they would have to round."""
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            total = super().reduce(tensor, group, "sum")
            return total.copy_(total / dist.get_world_size(group))
        return super().reduce(tensor, group, reduce_op)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """While gradients accumulate: without communication in stages 0 and 1; in stages 2 and 3 backwards reduce."""
        assert isinstance(self.model, FullyShardedModule)  # as setup says
        if self.model._zeropg_state.core.stage >= 2:
            yield
            return
        with no_sync(self.model):
            yield

    # --- files: Lightning's own, with whole tensors ---

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights from the masters, on rank 0; {} elsewhere. All ranks must call."""
        assert self.model is not None  # as setup says
        return full_state_dict(self.model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state in torch's layout, on rank 0; {} elsewhere. All ranks must call."""
        inner = _unwrapped(optimizer)
        assert isinstance(inner, ShardedOptimizer)  # as setup_optimizers makes them
        return _with_numbers(full_optimizer_state_dict(inner))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None  # as setup says
        self.model.load_state_dict(checkpoint["state_dict"], strict=strict)


def _with_numbers(named: dict[str, Any]) -> dict[str, Any]:
    """A state dict under names as torch has it: parameters by number, in the order of the groups."""
    if not named:
        return {}
    names = [name for group in named["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in named["param_groups"]]
    return {"state": {number[name]: state for name, state in named["state"].items()}, "param_groups": groups}


def _is_plain_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    return cast(torch.optim.Optimizer, getattr(optimizer, "_optimizer", optimizer))
