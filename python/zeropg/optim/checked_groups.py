"""Options of param groups are looked at where a group is added, and before each step: `CheckedOptimizer`, and on all
ranks `digest_of_options`."""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

Group = dict[str, Any]

# How torch's classes compute, which does not change what.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOTHING = 1e-12  # less than any option means


class CheckedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that takes no options out of range, whoever puts them into a param group, and when."""

    def add_param_group(self, param_group: Group) -> None:
        """As torch's. Raises ValueError for options out of range; the optimizer then lacks the group."""
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def check_before_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError where the program has put options out of range since; nothing has been stepped then.

        A negative lr is none of them: it climbs, and schedulers round 0 to it.
        """
        for group in groups:
            self.check_group(group, least_lr=-math.inf)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient. Returns what `closure` does.

        Where ranks average in a step, all must call.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_before_step(self.param_groups)
        self.update_all()
        return loss

    def update_all(self) -> None:
        """What a step does once the options are good: `update_one` for each parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_one(parameter, parameter.grad, group)

    def update_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> None:
        """Steps one parameter, in optimizers that leave `update_all` as it is."""
        raise NotImplementedError

    @abstractmethod
    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        """Raises ValueError for options out of range."""


def check_numbers(
    who: str, group: Mapping[str, Any], not_negative: Sequence[str], below_1: Sequence[str] = (), *, least_lr: float
) -> None:
    """Raises ValueError, with all of the numbers, where one is out of range or NaN.

    not_negative, below_1: names of options that must be >= 0, and in [0, 1). A value may be a tuple of numbers, or a
      tensor of one.
    """
    least = {**dict.fromkeys([*not_negative, *below_1], 0.0), "lr": least_lr}
    if all(
        least[key] <= number and (key not in below_1 or number < 1)
        for key in least
        for number in (group[key] if isinstance(group[key], (tuple, list)) else [group[key]])
    ):
        return
    given = ", ".join(f"{key} {group[key]}" for key in ("lr", *not_negative, *below_1))
    wanted = ", ".join(("lr",) * (least_lr == 0) + tuple(not_negative))
    raise ValueError(
        f"[zeropg] {who}: {given}; expected numbers, with {wanted} >= 0"
        + (f" and {', '.join(below_1)} in [0, 1)" if below_1 else "")
    )


def digest_of_options(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    sharded: Set[int],
    what_else: Sequence[float | tuple[float, ...] | None],
    written: Set[str] = frozenset(),
) -> tuple[int, int]:
    """Returns two numbers, not 0, of the options of param groups and how many parameters of `sharded` each holds.

    Of those that torch's and zeropg's classes know; of a class of the program's own the learning rate, and what its
    steps have `written`. What else is in a group is the program's own. The two round numbers at other places: ranks
    whose numbers differ in the last digits, as those of processors of different makes do, have one in common.

    optimizer: whose class it is. sharded: ids of parameters; ranks may have others of their own. what_else: numbers
      that must be the same, too.
    """
    is_known = type(optimizer).__module__.startswith(("torch.optim.", "zeropg."))
    keys = sorted(optimizer.defaults.keys() - _IMPLEMENTATION) if is_known else sorted({"lr", *written})
    told: list[list[tuple[Any, Any]]] = [[_told(each) for each in what_else]]
    for group in groups:
        if count := sum(id(parameter) in sharded for parameter in group["params"]):
            told.append([(count, count), *(_told(group.get(key)) for key in keys)])
    first, second = (zlib.crc32(repr([[each[k] for each in group] for group in told]).encode()) for k in (0, 1))
    return first + 1, second + 1


def _told(value: Any) -> tuple[Any, Any]:
    """A number, or several, rounded in two ways: one of them is the same where it differs by less than a millionth."""
    if isinstance(value, (tuple, list)):
        each = [_told(one) for one in value]
        return [one for one, _ in each], [one for _, one in each]
    if not isinstance(value, (int, float)) or abs(value) < _NOTHING:  # bool is an int
        return None, None
    if not math.isfinite(value):
        return str(value), str(value)
    place = math.log(abs(value)) * 1e6
    return (value > 0, math.floor(place)), (value > 0, math.floor(place + 0.5))
