"""DeepSpeed's Muon: which parameters go by it, and its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zeropg import optim

_NOT_HIDDEN = ("embed", "lm_head")  # in a name, whatever its case


class Muon(optim.Muon):
    """zeropg.optim.Muon with DeepSpeed's arguments and defaults (MuonWithAuxAdam): parameters whose `use_muon` is true
    go by Muon, others by AdamW.

    lr, muon_lr, adam_lr: of both; instead of it for the ones and for the others. Default: 0.02 and 3e-4.
    betas, eps: of AdamW, also in a param group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
    ) -> None:
        given = list(params)
        is_grouped = bool(given) and isinstance(given[0], dict)
        groups = (
            [{**group, "params": _listed(group["params"])} for group in given] if is_grouped else [{"params": given}]
        )
        rates = {True: _first(muon_lr, lr, 0.02), False: _first(adam_lr, lr, 3e-4)}
        split = [
            {"lr": rates[goes], **_with_own_eps(group), "params": chosen, "use_muon": goes}
            for group in groups
            for goes in (True, False)
            if (chosen := [p for p in group["params"] if bool(getattr(p, "use_muon", p.ndim == 2)) == goes])
        ]
        super().__init__(split, rates[True], weight_decay, momentum, betas=betas, adamw_eps=eps)


def _first(*rates: float | None) -> float:
    return next(rate for rate in rates if rate is not None)


def _with_own_eps(group: dict[str, Any]) -> dict[str, Any]:
    """A group of DeepSpeed's in the words of zeropg.optim.Muon, whose `eps` is that of the orthogonal matrices."""
    return {"adamw_eps" if key == "eps" else key: value for key, value in group.items()}


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def tag_hidden_matrices(model: nn.Module) -> None:
    """Sets `use_muon` of parameters that have none, as DeepSpeed does: by dimensions and name, not by kind of module.

    So an embedding that is called `wte` goes by Muon. Raises NotImplementedError for tensors of more dimensions, which
    DeepSpeed steps by Muon.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "use_muon"):
            continue
        is_hidden = parameter.ndim >= 2 and not any(part in name.lower() for part in _NOT_HIDDEN)
        if is_hidden and parameter.ndim > 2 and parameter.requires_grad:
            raise NotImplementedError(
                f"[zeropg] Muon: {name!r} has shape {list(parameter.shape)}, which DeepSpeed steps by Muon, and zeropg "
                "steps matrices alone so; set `use_muon = False` on the parameter before initialize: AdamW then steps "
                "it"
            )
        parameter.use_muon = is_hidden  # type: ignore[attr-defined]
