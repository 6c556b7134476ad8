"""`dcp_state_dict`: what torch.distributed.checkpoint saves and loads of a sharded model and its optimizers."""

from __future__ import annotations

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from zeropg.checkpoint.dcp.model_state import ModelState
from zeropg.checkpoint.dcp.optimizer_state import OptimizerState
from zeropg.checkpoint.manifest import ALONE
from zeropg.checkpoint.optimizers import Optimizers, named_optimizers
from zeropg.optim.adafactor import AdafactorRule
from zeropg.optim.momentum_optimizer import MomentumOptimizer


def dcp_state_dict(model: nn.Module, optimizer: Optimizers | None = None) -> dict[str, Stateful]:
    """Returns what `torch.distributed.checkpoint` saves and loads of a sharded model. Does not communicate.

        state = zeropg.dcp_state_dict(model, optimizer)
        dcp.save(state, checkpoint_id="checkpoint")
        dcp.load(state, checkpoint_id="checkpoint")  # sets model and optimizer: any stage, any world size

    Each rank writes and reads its own elements only. The checkpoint is one like any other of DCP: it has whole tensors
    under the model's own names, which plain modules, FSDP2 and dcp_to_torch_save read, and what these wrote loads here.

    - Parameters are the masters, in their precision. Tied ones stand under each of their names. Other floating dtypes
      are cast, other kinds of dtypes are refused.
    - Of parameters that are DTensors it has the whole tensors, too; give dcp.save and dcp.load all ranks' group.
    - The optimizer's state has the layout of torch's get_optimizer_state_dict, by parameter names.
    - A load holds this rank's elements twice until every rank has read its own, so one that fails leaves what it was
      reading (model or optimizer) as it was; what stands before that in the dictionary is loaded by then.
    - dcp.async_save copies this rank's elements, then writes: with its default stager, in threads, over another group
      than the model's (`process_group=dist.new_group()`).
    - Give each save a folder of its own: DCP writes over an older checkpoint in place.
    - HuggingFaceStorageReader reads safetensors; its writer is refused, since it keeps one box of a tensor per file.
    - dcp.save(use_collectives=False) is not supported: a rank's own metadata lack what other ranks write.

    What compression still owes to the gradients is not saved: `save_checkpoint` does that.

    Args:
        model: a module that `fully_shard` has sharded, in any stage.
        optimizer: what `shard_optimizer` returned for it; several as a sequence or as a dict by name.

    Returns:
        {"model": ..., "optimizer": ...}; of several optimizers "optimizer.<name>" each. The values are Stateful: they
        may stand under other keys, among values of the caller's own, at the top of what dcp.save and dcp.load get.
        Elsewhere call their `state_dict()` before and `load_state_dict()` afterwards, on all ranks.

    Raises:
        ValueError: the model is not sharded, or the optimizer is another model's.
        TypeError: the optimizer is not sharded.
        NotImplementedError: the optimizer averages momenta; use `save_checkpoint`.
    """
    states: dict[str, Stateful] = {"model": ModelState(model)}
    for name, one in named_optimizers(optimizer, model, "dcp_state_dict").items():
        if isinstance(one._wrapped, MomentumOptimizer):
            raise NotImplementedError(
                f"[zeropg] dcp_state_dict: {type(one._wrapped).__name__} keeps what ranks owe each other, which "
                "torch.distributed.checkpoint cannot hold; use zeropg.save_checkpoint"
            )
        if isinstance(one._rule, AdafactorRule):
            raise NotImplementedError(
                f"[zeropg] dcp_state_dict: {type(one._wrapped).__name__} keeps sums of rows and columns, which are no "
                "part of a tensor that torch.distributed.checkpoint could cut; use zeropg.save_checkpoint"
            )
        states["optimizer" if name == ALONE else f"optimizer.{name}"] = OptimizerState(one, name)
    return states
