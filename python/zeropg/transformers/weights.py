"""The weights that a Trainer's `save_model` writes, and the prompts of PEFT's among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from zeropg.checkpoint.state_dict import full_state_dict
from zeropg.sharding.access import full_parameters
from zeropg.sharding.sharded_class import FullyShardedModule
from zeropg.sharding.state import state_of


def weights_to_save(model: nn.Module, *, rank0_only: bool) -> dict[str, torch.Tensor]:
    """Returns whole weights of a sharded model in the dtype that it computes in, on the CPU. All ranks must call.

    Buffers keep their own dtypes. rank0_only: {} on all ranks but rank 0. Of a PEFT model the frozen base is left out,
    but for what PEFT saves of it; every adapter is there, whether it trains or not.
    """
    wanted = _saved_with_adapters(model) if _is_peft(model) else None
    return full_state_dict(model, dtype=state_of(model, "save_model").param_dtype, rank0_only=rank0_only, only=wanted)


@contextmanager
def prompts_to_save(model: nn.Module) -> Iterator[None]:
    """Where PEFT's save_pretrained may be called: its prompts (prompt, prefix and P-tuning) are not taken from a state
    dict, but computed from the model's own parameters. All ranks must enter and leave.

    They are computed before, in a forward of the root, so that the base stays in shards. PEFT reads prompts that do
    not train where they are; for these the whole model is made whole.
    """
    prompts = _prompts_of(model)
    if not prompts:
        yield
    elif any(config.inference_mode for config in prompts.values()):
        with full_parameters(model):
            yield
    else:
        peft_model = cast(Any, model)
        state, index = vars(model)["_zeropg_unit"]
        compute = peft_model.get_prompt_embedding_to_save
        with torch.no_grad():
            computed = {name: state.run(index, compute, (name,), {}, casts_inputs=False) for name in prompts}
        peft_model.get_prompt_embedding_to_save = computed.__getitem__
        try:
            yield
        finally:
            del peft_model.get_prompt_embedding_to_save


@contextmanager
def prompts_to_load(model: nn.Module) -> Iterator[None]:
    """Where PEFT's load_adapter may be called, which sets a prompt's embedding by a load_state_dict of its own: the
    whole model is whole for that. All ranks must enter, load and leave."""
    encoders = [cast(Any, model).prompt_encoder[name] for name in _prompts_of(model)]
    embeddings = [encoder.embedding for encoder in encoders if hasattr(encoder, "embedding")]
    for embedding in embeddings:
        embedding.load_state_dict = full_parameters(model, writable=True)(embedding.load_state_dict)
    try:
        yield
    finally:
        for embedding in embeddings:
            del embedding.load_state_dict


def _prompts_of(model: nn.Module) -> dict[str, Any]:
    """PEFT's configurations of a sharded model's prompts, by the adapter's name."""
    adapters = cast(Any, model).peft_config if isinstance(model, FullyShardedModule) and _is_peft(model) else {}
    return {name: config for name, config in adapters.items() if config.is_prompt_learning}


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def _saved_with_adapters(model: nn.Module) -> set[str]:
    """Names of the parameters that PEFT's save_pretrained may write, which saves every adapter of the model."""
    embeddings = [_embeddings(model, "get_input_embeddings"), _embeddings(model, "get_output_embeddings")]
    frozen = {id(p) for module in embeddings if module is not None for p in module.parameters()}
    named = dict(model.named_parameters(remove_duplicate=False))
    wanted = {name for name, parameter in named.items() if parameter.requires_grad or id(parameter) in frozen}
    for adapter, config in cast(Any, model).peft_config.items():
        # Also what PEFT derives its values from: pruned ranks, top-k weights, prompts.
        wanted.update(name for name in named if f".{adapter}." in f"{name}.")
        if not config.is_prompt_learning:  # whose prompts have the adapter's name
            wanted.update(_asked_for(model, adapter))
    return wanted & named.keys()


def _asked_for(model: nn.Module, adapter: str) -> set[str]:
    """Names of what PEFT picks from a state dict, asked with one of the same shapes that takes no memory."""
    from peft import get_peft_model_state_dict

    tensors = {
        name: torch.zeros((), dtype=value.dtype).expand(value.shape)
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    asked = get_peft_model_state_dict(model, tensors, adapter_name=adapter, save_embedding_layers=False)
    picked = {id(value) for value in asked.values()}
    return {name for name, value in tensors.items() if id(value) in picked}


def _embeddings(model: nn.Module, getter: str) -> nn.Module | None:
    """None where a model has none: some say so by an error."""
    try:
        found: nn.Module | None = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found
