"""Attributes that DeepSpeed's stage 3 gives parameters, and by which programs know that they are sharded."""

from __future__ import annotations

import enum
import itertools
import weakref
from typing import Any

from torch import nn

from zeropg.tensor_parallel.distributed import local_of

_IDS = itertools.count()


class ZeroParamStatus(enum.Enum):
    """What `parameter.ds_status` compares with. Nothing is INFLIGHT: a read waits for what is on its way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Status:
    """`parameter.ds_status`: equal to AVAILABLE where its values can be read now, and to NOT_AVAILABLE elsewhere."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)

    @property
    def now(self) -> ZeroParamStatus:
        """What it is now. Raises ReferenceError where the parameter is gone."""
        parameter = self._parameter()
        if parameter is None:
            raise ReferenceError("[zeropg] ds_status: the parameter does not exist any more")
        try:
            local_of(parameter.detach())[(slice(0, 1),) * parameter.dim()].clone()
        except RuntimeError:  # what every read raises then
            return ZeroParamStatus.NOT_AVAILABLE
        return ZeroParamStatus.AVAILABLE

    @property
    def name(self) -> str:
        return self.now.name

    @property
    def value(self) -> int:
        return int(self.now.value)

    def __eq__(self, other: object) -> bool:
        return self.now is (other.now if isinstance(other, Status) else other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return repr(self.now)

    def __reduce__(self) -> tuple[Any, ...]:
        return ZeroParamStatus, (self.value,)


def set_attributes(module: nn.Module) -> None:
    """Gives each parameter of a model in stage 3 `ds_id`, `ds_shape`, `ds_numel` and `ds_status`.

    There is no `ds_tensor`: `zeropg.local_shards` has what a rank keeps, which is cut at other places.
    """
    for parameter in module.parameters():
        made: Any = parameter
        made.ds_id = next(_IDS)
        made.ds_shape = parameter.shape
        made.ds_numel = parameter.numel()
        made.ds_status = Status(parameter)
