"""A topology-aware c10d backend and ZeRO sharding for PyTorch.

The backend: `torch.distributed.init_process_group("zeropg")`, also without importing this package.
The sharded module: `fully_shard(model)` and `shard_optimizer(optimizer, model)`, over any c10d process group.
DeepSpeed's calls: `initialize`, and `import zeropg.deepspeed as deepspeed`.
Hugging Face: `zeropg.transformers.Trainer`, `zeropg.accelerate.prepare`. Lightning: `zeropg.lightning.ZeroPGStrategy`.
Fewer bytes between ranks: `zeropg.compression`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import _zeropg_register
from zeropg import _native as _native  # checks versions before anything loads the core
from zeropg import _notices as _notices
from zeropg import compression as compression
from zeropg import optim as optim
from zeropg.backend import BackendOptions, Topology, empty, shrink_group, stats, topology
from zeropg.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from zeropg.checkpoint.ema import ema
from zeropg.checkpoint.pretrained import load_pretrained
from zeropg.checkpoint.state_dict import full_optimizer_state_dict, full_state_dict, load_full_state_dict
from zeropg.export.save_16bit_weights import save_16bit_weights
from zeropg.flight_recorder import dump_flight_recorder
from zeropg.optim.grad_scaler import GradScaler
from zeropg.optim.shard_optimizer import shard_optimizer
from zeropg.partial import PartialReduction, partial_hook
from zeropg.quantization.quantize_frozen import dequantize_frozen, quantize_frozen
from zeropg.sharding.access import (
    clip_grad_norm_,
    full_gradients,
    full_parameters,
    local_shards,
    no_sync,
    writable_shards,
)
from zeropg.sharding.activations import checkpoint_activations
from zeropg.sharding.fully_shard import fully_shard, register_forward_method
from zeropg.sharding.offload import Offload
from zeropg.sharding.sharded_class import FullyShardedModule

if TYPE_CHECKING:
    from zeropg.checkpoint.dcp.state_dict import dcp_state_dict
    from zeropg.deepspeed.initialize import initialize

_zeropg_register.register()


# Not imported at once: they take their time, or need packages that an installation may lack.
_LAZY_MODULES = ("accelerate", "deepspeed", "lightning", "transformers")


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"zeropg.{name}")
    if name == "initialize":  # not at once: its models of DeepSpeed's configuration take a tenth of a second
        from zeropg.deepspeed.initialize import initialize

        return initialize
    if name == "dcp_state_dict":  # torch.distributed.checkpoint takes as long
        from zeropg.checkpoint.dcp.state_dict import dcp_state_dict

        return dcp_state_dict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BackendOptions",
    "FullyShardedModule",
    "GradScaler",
    "Offload",
    "PartialReduction",
    "Topology",
    "checkpoint_activations",
    "clip_grad_norm_",
    "dcp_state_dict",
    "dequantize_frozen",
    "dump_flight_recorder",
    "ema",
    "empty",
    "full_gradients",
    "full_optimizer_state_dict",
    "full_parameters",
    "full_state_dict",
    "fully_shard",
    "initialize",
    "load_checkpoint",
    "load_full_state_dict",
    "load_pretrained",
    "local_shards",
    "no_sync",
    "partial_hook",
    "quantize_frozen",
    "register_forward_method",
    "save_16bit_weights",
    "save_checkpoint",
    "shard_optimizer",
    "shrink_group",
    "stats",
    "topology",
    "writable_shards",
]
