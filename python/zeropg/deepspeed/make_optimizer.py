"""The optimizer that a configuration, or a program's function, makes over a model's parameters: not sharded yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeropg.deepspeed.config import Config
from zeropg.deepspeed.config.optimizers import Made, wants_states_in_16_bits
from zeropg.deepspeed.muon import Muon, tag_hidden_matrices


def make_optimizer(
    make: Made | Callable[[list[Any]], torch.optim.Optimizer], model: nn.Module, parameters: Iterable[Any]
) -> torch.optim.Optimizer:
    """Returns what `make` makes of parameters or param groups of `model`; groups that hold nothing are left out.

    Parameters that the configuration's Muon steps as matrices are marked before. Raises NotImplementedError for tensors
    of more dimensions, which DeepSpeed steps so.
    """
    if isinstance(make, Made) and make.type is Muon:
        tag_hidden_matrices(model)
    made: torch.optim.Optimizer = make(list(parameters))
    made.param_groups[:] = [group for group in made.param_groups if group["params"]]
    return made


def check_state_bits(optimizer: torch.optim.Optimizer, config: Config, who: str) -> None:
    """Raises ValueError where the configuration wants states in 16 bits, and a program's own optimizer keeps others.

    who: whose optimizer it is, for messages.
    """
    if wants_states_in_16_bits(config) and any(group.get("state_bits") != 16 for group in optimizer.param_groups):
        raise ValueError(
            f"[zeropg] {who}: bf16.bf16_optimizer_states is true, and the {type(optimizer).__name__} that was passed "
            "keeps its state in the masters' dtype; expected zeropg.optim.AdamW(state_bits=16), or the block "
            '"optimizer" to say its type'
        )
