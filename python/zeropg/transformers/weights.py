"""The weights that a Trainer's `save_model` writes."""

from __future__ import annotations

import torch
from torch import nn

from zeropg.checkpoint.state_dict import full_state_dict
from zeropg.sharding.state import state_of


def weights_to_save(model: nn.Module, *, rank0_only: bool) -> dict[str, torch.Tensor]:
    """Returns whole weights of a sharded model in the dtype that it computes in, on the CPU. All ranks must call.

    rank0_only: {} on all ranks but rank 0. Of a PEFT model the frozen base is left out, but for its embeddings, which
    PEFT saves where their size has changed.
    """
    wanted = _saved_with_adapters(model) if hasattr(model, "peft_config") else None
    return full_state_dict(model, dtype=state_of(model, "save_model").param_dtype, rank0_only=rank0_only, only=wanted)


def _saved_with_adapters(model: nn.Module) -> set[str]:
    embeddings = [_embeddings(model, "get_input_embeddings"), _embeddings(model, "get_output_embeddings")]
    frozen = {id(p) for module in embeddings if module is not None for p in module.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter.requires_grad or id(parameter) in frozen}


def _embeddings(model: nn.Module, getter: str) -> nn.Module | None:
    """None where a model has none: some say so by an error."""
    try:
        found: nn.Module | None = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found
