"""Where an engine's rank stands: attributes and calls of DeepSpeed's about ranks and their groups."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropg.deepspeed.tensor_parallel.ranks import TENSORS
from zeropg.sharding.state import ShardedState


class PlacedEngine:
    """The part of DeepSpeedEngine that says where its rank stands."""

    module: nn.Module
    world_size: int
    dp_world_size: int
    _mesh: DeviceMesh | None
    _group: dist.ProcessGroup
    _state: ShardedState

    mpu: Any = None  # as `initialize` was given it
    sequence_parallel_size = 1
    seq_parallel_group = None
    pipeline_parallelism = False
    has_moe_layers = False
    gradient_average = True
    enable_backward_allreduce = True
    losses = None  # as in DeepSpeed, whose engine keeps none either
    _in_no_sync: bool

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    @property
    def seq_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    @property
    def seq_dp_world_size(self) -> int:
        return self.dp_world_size

    @property
    def mp_world_size(self) -> int:
        """How many ranks share layers."""
        return 1 if self._mesh is None else self._mesh.get_group(TENSORS).size()

    @property
    def dist_backend(self) -> str:
        return dist.get_backend(self._group)

    @property
    def inside_no_sync_ctxt(self) -> bool:
        return self._in_no_sync

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter of the model."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def get_data_parallel_rank(self) -> int:
        return self._group.rank()

    def get_model_parallel_rank(self) -> int:
        """The number of this rank among those that share its layers."""
        return 0 if self._mesh is None else int(self._mesh.get_local_rank(TENSORS))

    def get_tensor_parallel_rank(self) -> int:
        """As get_model_parallel_rank()."""
        return self.get_model_parallel_rank()

    def get_sequence_parallel_group(self) -> None:
        """None: sequences are not split over ranks."""

    def is_first_weights_partition_group(self) -> bool:
        """Whether this rank has a part of the first copy of a model that is sharded in stage 3."""
        return self._state.core.stage >= 3 and self._state.core.replica == 0
