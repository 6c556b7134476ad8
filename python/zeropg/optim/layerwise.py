"""Optimizers whose update of an element depends on its whole parameter: on norms, on factors, on the matrix itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from zeropg.optim.checked_groups import CheckedOptimizer
from zeropg.optim.peers import Alone, Peers, Piece

Group = dict[str, Any]


class LayerwiseRule(Protocol):
    """How one kind of optimizer steps. It holds no state of a training run.

    Where a rule says nothing else, it takes every parameter and keeps no factors.
    """

    # Keys of a parameter's state that have a value for each element.
    tensor_state: frozenset[str]
    # The fused kernel for the parameters that the rule does not take; "" where it takes all.
    others_kernel: str = ""

    def factor_shapes(self, parameter: torch.Tensor) -> dict[str, torch.Size]:
        """Shapes of the state, by key, that each rank with a part of the parameter keeps whole (see `FACTORS`)."""
        return {}

    def takes(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the rule needs this parameter whole; it is stepped element by element otherwise."""
        return True

    def others_options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What `others_kernel` reads of a param group."""
        return {}

    def update_(self, pieces: Sequence[Piece], peers: Peers) -> None:
        """Steps weights and state in place, also of pieces that it does not take. All ranks call."""


class LayerwiseOptimizer(CheckedOptimizer):
    """A torch optimizer with a LayerwiseRule. Its own `step` is for one process that has whole parameters, or for
    ranks that all have them and their averaged gradients (DistributedDataParallel); each then computes everything.
    """

    rule: ClassVar[LayerwiseRule]

    def update_all(self) -> None:
        pieces = [
            whole_piece(parameter, parameter.grad, group, self.state[parameter])
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self.rule.update_(pieces, Alone())


def whole_piece(parameter: torch.Tensor, gradient: torch.Tensor, group: Group, state: dict[str, Any]) -> Piece:
    numel = parameter.numel()
    return Piece(parameter, parameter, gradient, 0, numel, group, state, slice(0, numel), [(0, numel)])


def squares(*lists: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n, k], fp64: sums of squares of n tensors of each of k lists."""
    if not lists[0]:
        return torch.zeros(0, len(lists), dtype=torch.float64)
    norms = torch._foreach_norm([tensor for tensors in lists for tensor in tensors], 2, torch.float64)
    return torch.stack(list(norms)).square().view(len(lists), -1).T.contiguous()
