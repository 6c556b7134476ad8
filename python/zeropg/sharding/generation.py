"""`let_generate`: texts that a sharded model generates, as Hugging Face's models do."""

from __future__ import annotations

from torch import nn

from zeropg.sharding.fully_shard import register_forward_method
from zeropg.sharding.state import state_of


def let_generate(model: nn.Module) -> None:
    """Lets `generate`, where a model has one, be called as its forward is. Does not communicate.

    It may begin with a part of the model, whose own call makes nothing whole: PEFT's models call their base, and those
    with an encoder call that. Below stage 3 parameters are whole anyway.
    """
    if state_of(model, "let_generate").core.stage >= 3 and callable(getattr(model, "generate", None)):
        register_forward_method(model, "generate")
