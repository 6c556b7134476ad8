"""DeepSpeed's Muon: which parameters go by it, and its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zeropg import optim

_NOT_HIDDEN = ("embed", "lm_head")  # in a name, whatever its case


class Muon(optim.Muon):
    """zeropg.optim.Muon with DeepSpeed's arguments: parameters whose `use_muon` is true go by Muon, others by AdamW.

    muon_lr, adam_lr: instead of lr, for the ones and for the others. The others as in zeropg.optim.Muon, where `eps` is
    adamw_eps; scaled as "original".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        given = list(params)
        is_grouped = bool(given) and isinstance(given[0], dict)
        groups = (
            [{**group, "params": _listed(group["params"])} for group in given] if is_grouped else [{"params": given}]
        )
        rates = {True: lr if muon_lr is None else muon_lr, False: lr if adam_lr is None else adam_lr}
        split = [
            {"lr": rates[goes], **group, "params": chosen, "use_muon": goes}
            for group in groups
            for goes in (True, False)
            if (chosen := [p for p in group["params"] if bool(getattr(p, "use_muon", p.ndim == 2)) == goes])
        ]
        super().__init__(split, lr, weight_decay, momentum, betas=betas, adamw_eps=eps)


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def tag_hidden_matrices(model: nn.Module) -> None:
    """Sets `use_muon` of parameters that have none: whether it is a matrix of a hidden layer."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "use_muon"):
            is_hidden = id(parameter) not in tables and not any(part in name.lower() for part in _NOT_HIDDEN)
            parameter.use_muon = parameter.ndim == 2 and is_hidden  # type: ignore[attr-defined]
