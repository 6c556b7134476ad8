"""Adafactor (Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"), as
torch.optim.Adafactor has it: see its documentation for what differs from the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeropg.optim.checked_groups import check_numbers
from zeropg.optim.layerwise import LayerwiseOptimizer, LayerwiseRule, squares
from zeropg.optim.peers import Peers, Piece
from zeropg.optim.row_spans import row_spans, sums_of_squares


class AdafactorRule(LayerwiseRule):
    """Every parameter: what it needs of the others are sums. Reads torch.optim.Adafactor's param groups, too.

    What is computed for each element is a sequence of single operations, each correctly rounded, so that an element's
    result does not depend on where ATen's vector loops end: stages agree to the bit.
    """

    tensor_state = frozenset({"variance"})

    def factor_shapes(self, parameter: torch.Tensor) -> dict[str, torch.Size]:
        if parameter.ndim < 2:
            return {}
        *batch, rows, columns = parameter.shape
        return {"row_var": torch.Size((*batch, rows, 1)), "col_var": torch.Size((*batch, 1, columns))}

    def update_(self, pieces: Sequence[Piece], peers: Peers) -> None:
        pieces = [piece for piece in pieces if piece.parameter.numel()]
        for piece in pieces:
            self._check(piece)
            self._begin(piece)
        weights = peers.total(squares([piece.count(piece.weight) for piece in pieces]))
        self._learn(pieces, peers)
        updates = [_direction(piece) for piece in pieces]
        lengths = peers.total(squares([piece.count(update) for piece, update in zip(pieces, updates, strict=True)]))
        for piece, update, weight, length in zip(
            pieces, updates, weights[:, 0].tolist(), lengths[:, 0].tolist(), strict=True
        ):
            _step(piece, update, weight, length)

    def _check(self, piece: Piece) -> None:
        if piece.weight.is_complex() or piece.gradient.layout != torch.strided:
            raise NotImplementedError(
                f"[zeropg] Adafactor.step: a parameter of shape {list(piece.parameter.shape)} is {piece.weight.dtype} "
                f"with a gradient of layout {piece.gradient.layout}; expected real numbers and dense gradients"
            )

    def _begin(self, piece: Piece) -> None:
        """State before a parameter's first step, and one more step: as torch.optim.Adafactor keeps it."""
        state = piece.state
        if not state:
            state["step"] = torch.tensor(0.0)
            shapes = self.factor_shapes(piece.parameter)
            state.update({key: piece.weight.new_zeros(shape) for key, shape in shapes.items()})
            if not shapes:
                state["variance"] = torch.zeros_like(piece.weight)
        state["step"] += 1

    def _learn(self, pieces: Sequence[Piece], peers: Peers) -> None:
        """Takes the averaged gradients into the running means of their squares."""
        matrices = [piece for piece in pieces if piece.parameter.ndim > 1]
        if matrices:
            sums = [sums_of_squares(piece.count(piece.gradient), *_counted_place(piece)) for piece in matrices]
            flat = peers.total(torch.cat([part.reshape(-1) for pair in sums for part in pair]))
            parts = iter(flat.split([part.numel() for pair in sums for part in pair]))
            for piece in matrices:
                for key, across in (("row_var", piece.parameter.size(-1)), ("col_var", piece.parameter.size(-2))):
                    running = piece.state[key]
                    mean = (next(parts) / across).to(running.dtype).view(running.shape)
                    _blend_(running, mean, _share(piece))
        for piece in pieces:
            if piece.parameter.ndim < 2:
                running = piece.state["variance"]
                gradient = piece.gradient.to(running.dtype).view(running.shape)
                _blend_(running, gradient * gradient, _share(piece))


class Adafactor(LayerwiseOptimizer):
    """Adam without momentum, whose variance of a matrix is kept as a row and a column.

    The update, its defaults and its state are torch.optim.Adafactor's. Over a sharded model (`zeropg.shard_optimizer`,
    stages 0 to 3), which takes torch.optim.Adafactor, too, each rank steps its own elements, and keeps the row and the
    column of each matrix that it has a part of. A step's traffic is three all-reduces: 8 bytes per row and column of
    each matrix, and twice 8 bytes per parameter tensor. During the step 4 bytes per element of this rank are needed,
    and 8 per element of its largest piece.

    lr: the most that a step moves an element, relative to the root mean square of its parameter; also times
      weight_decay.
    beta2_decay: the step's gradient has the share step ** beta2_decay in the variance.
    eps: (least deviation that a gradient is divided by, None: the epsilon of the weights' dtype; least root mean square
      of a parameter).
    d: root mean square of an update above which it is scaled down.
    foreach: has no effect.

    Raises ValueError for hyperparameters out of range, NotImplementedError for complex parameters and sparse gradients.
    """

    rule = AdafactorRule()

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        check_numbers("Adafactor", group, ["weight_decay"], least_lr=least_lr)
        eps1, eps2 = group["eps"]
        if not ((eps1 is None or eps1 >= 0) and eps2 >= 0 and group["beta2_decay"] <= 0 and group["d"] >= 1):
            raise ValueError(
                f"[zeropg] Adafactor: eps {group['eps']}, beta2_decay {group['beta2_decay']}, d {group['d']}; expected "
                "eps (None or >= 0, >= 0), beta2_decay <= 0 and d >= 1"
            )


def _share(piece: Piece) -> float:
    """Of this step's squares in the running means."""
    return float(piece.state["step"].item() ** piece.group["beta2_decay"])


def _blend_(running: torch.Tensor, new: torch.Tensor, share: float) -> None:
    """As Tensor.lerp_, in operations that round the same everywhere: see AdafactorRule."""
    difference = new - running
    if share < 0.5:
        running.add_(difference.mul_(share))
    else:
        running.copy_(new - difference.mul_(1 - share))


def _counted_place(piece: Piece) -> tuple[int, torch.Size]:
    return piece.start + piece.counted.start, piece.parameter.shape


def _direction(piece: Piece) -> torch.Tensor:
    """The gradient divided by its deviation, before it is scaled. Flat, one value for each element of the piece."""
    dtype = piece.weight.dtype
    eps = piece.group["eps"][0]
    eps = torch.finfo(dtype).eps if eps is None else eps
    variance = _variance(piece, eps) if piece.parameter.ndim > 1 else piece.state["variance"].reshape(-1).clone()
    deviation = variance.clamp_(min=eps * eps).sqrt_()
    return deviation.reciprocal_().mul_(piece.gradient.reshape(-1))


def _variance(piece: Piece, eps: float) -> torch.Tensor:
    """Row times column over their mean, of the elements of the piece. Flat."""
    rows, columns = piece.state["row_var"], piece.state["col_var"]
    count = rows.size(-2)
    means = rows.mean(dim=-2).clamp_(min=eps).reshape(-1)  # by matrix
    rows, columns = rows.reshape(-1), columns.reshape(-1, columns.size(-1))
    found = piece.weight.new_empty(piece.stop - piece.start)
    for span in row_spans(piece.start, piece.stop, count, columns.size(-1)):
        out = found[span.start - piece.start : span.stop - piece.start].view(span.rows, -1)
        own_rows = rows[span.first_row : span.first_row + span.rows, None]
        own_columns = columns[span.matrix, span.first_column : span.first_column + out.size(1)]
        torch.mul(own_rows, own_columns, out=out)
        out.div_(means[span.matrix])
    return found


def _step(piece: Piece, update: torch.Tensor, weight_squares: float, update_squares: float) -> None:
    group, numel = piece.group, piece.parameter.numel()
    lr = float(group["lr"])
    rate = min(lr, 1 / math.sqrt(piece.state["step"].item()))
    rate *= max(group["eps"][1], math.sqrt(weight_squares / numel))
    rate /= max(1.0, math.sqrt(update_squares / numel) / group["d"])
    if group["weight_decay"] != 0:
        piece.weight.mul_(1 - lr * group["weight_decay"])
    update.mul_(rate if group["maximize"] else -rate)
    piece.weight.add_(update.view(piece.weight.shape))
