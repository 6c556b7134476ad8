"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon; scaled as in Liu et al. 2025, "Muon is Scalable for LLM Training")."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeropg.optim.adam_rule import adamw_, begin
from zeropg.optim.checked_groups import check_numbers
from zeropg.optim.layerwise import LayerwiseOptimizer, LayerwiseRule
from zeropg.optim.peers import Peers, Piece

_ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {  # of lr, by (rows, columns)
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class MuonRule(LayerwiseRule):
    """Matrices; what else an optimizer holds is stepped by AdamW. Reads torch.optim.Muon's param groups, too."""

    tensor_state = frozenset({"momentum_buffer"})
    others_kernel = "adamw"

    def takes(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> bool:
        use_muon = group.get("use_muon")
        return parameter.ndim == 2 if use_muon is None else bool(use_muon)

    def others_options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {**group, "eps": group["adamw_eps"], "amsgrad": False, "maximize": False}

    def update_(self, pieces: Sequence[Piece], peers: Peers) -> None:
        matrices: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._check_state(piece)
        for piece in pieces:
            if self.takes(piece.parameter, piece.group):
                matrices.setdefault(piece.group.get("ns_dtype", "bfloat16"), []).append(piece)
            else:
                piece.group = self.others_options(piece.group)
                begin(piece)
                adamw_(piece)
        for dtype, alike in matrices.items():
            momenta = [momentum_update(piece).to(_DTYPES[dtype]) for piece in alike]
            costs = [cost_of(*piece.parameter.shape) for piece in alike]
            for piece, update in zip(alike, peers.map_wholes(alike, momenta, _orthogonal, costs), strict=True):
                lr = float(piece.group["lr"])
                ratio = _ADJUSTMENTS[piece.group["adjust_lr_fn"] or "original"](*piece.parameter.shape)
                piece.weight.mul_(1 - lr * piece.group["weight_decay"]).add_(update, alpha=-lr * ratio)

    def _check_state(self, piece: Piece) -> None:
        is_taken = self.takes(piece.parameter, piece.group)
        if ("exp_avg" if is_taken else "momentum_buffer") in piece.state:
            raise ValueError(
                f"[zeropg] Muon.step: use_muon of a param group is {piece.group.get('use_muon')} now, but the state of "
                f"a parameter of shape {list(piece.parameter.shape)} is {'AdamW' if is_taken else 'Muon'}'s; set it "
                "back, or drop that state (optimizer.state.pop(parameter)) to begin anew"
            )


class Muon(LayerwiseOptimizer):
    """Momentum whose matrices are made orthogonal before they are added to the weights; AdamW for what is no matrix.

    Over a sharded model (`zeropg.shard_optimizer`, stages 0 to 3) each matrix is made orthogonal on one rank; ranks'
    shares of that work are balanced by its cost. A step's traffic in stages 1 to 3 is two all-to-alls: each rank sends
    and receives 2 + 2 bytes per element of its shard; in stage 0 it receives 2 bytes per element of the model. Twice as
    much with ns_dtype="float32". AdamW's part moves nothing, and runs on the fused kernel on the CPU.

    lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as torch.optim.Muon.
      With adjust_lr_fn="match_rms_adamw" one lr serves matrices and the rest.
    ns_dtype: in which matrices are made orthogonal: "bfloat16", which is torch's, "float32", which is faster on CPUs
      without units for bfloat16, or "float64".
    betas, adamw_eps: of AdamW, which takes lr and weight_decay of its group.
    use_muon: of a param group: True: its parameters, all matrices, go by Muon; False: by AdamW; None: matrices by Muon,
      the others by AdamW. Embeddings and output layers are matrices that belong to AdamW: put them in a group with
      use_muon=False.

    Raises ValueError for hyperparameters out of range, and for a group with use_muon=True that holds no matrix.
    """

    rule = MuonRule()

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str = "bfloat16",
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        use_muon: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "use_muon": use_muon,
        }
        super().__init__(params, defaults)

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        check_numbers(
            "Muon", group, ["weight_decay", "momentum", "eps", "adamw_eps", "ns_steps"], ["betas"], least_lr=least_lr
        )
        _check_words(group)


def momentum_update(piece: Piece) -> torch.Tensor:
    """Takes the gradient into the momentum; returns what is to be made orthogonal, of this piece."""
    state, momentum = piece.state, piece.group["momentum"]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(piece.gradient)
    buffer: torch.Tensor = state["momentum_buffer"].lerp_(piece.gradient, 1 - momentum)
    return piece.gradient.lerp(buffer, momentum) if piece.group["nesterov"] else buffer


def newton_schulz(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Moves the singular values of a matrix near 1 by `steps` steps of an odd polynomial of degree 5, in its dtype."""
    a, b, c = coefficients
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


def cost_of(rows: int, columns: int) -> float:
    """What a step of newton_schulz takes, in multiplications."""
    short, long = sorted((rows, columns))
    return float(short * short * (2 * long + short))


def _orthogonal(piece: Piece, whole: torch.Tensor) -> torch.Tensor:
    group = piece.group
    return newton_schulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _check_words(group: Mapping[str, Any]) -> None:
    if group["adjust_lr_fn"] not in (None, *_ADJUSTMENTS):
        raise ValueError(
            f"[zeropg] Muon: adjust_lr_fn is {group['adjust_lr_fn']!r}; expected None, or one of "
            f"{', '.join(_ADJUSTMENTS)}"
        )
    if group["ns_dtype"] not in _DTYPES:
        raise ValueError(f"[zeropg] Muon: ns_dtype is {group['ns_dtype']!r}; expected one of {', '.join(_DTYPES)}")
    if group["use_muon"] and (others := [list(p.shape) for p in group["params"] if p.ndim != 2]):
        raise ValueError(
            f"[zeropg] Muon: a group with use_muon=True has parameters of shapes {others[:3]}; expected matrices: put "
            "the others in a group with use_muon=False"
        )
