"""DeepSpeed's `utils.init_on_device`: modules that are built on another device, or without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# What modules make their parameters and buffers with. Others keep their place and dtype, as in DeepSpeed: tables that a
# module computes (torch.arange) have their values, also where its parameters have none.
_CONSTRUCTORS = frozenset({torch.empty, torch.zeros, torch.ones, torch.full})


class OnDevice:
    """Context in which torch.empty, zeros, ones and full make tensors on a device, floating ones in a dtype.

    They do for modules of torch.nn. On "meta", the default, nothing has memory or values: `initialize` gives both, by
    the modules' reset_parameters, to one unit after the other.

    Args:
        dtype: of floating tensors, whatever a call asks for; None: what it asks for.
        device: of calls that name none.
        enabled: False: nothing happens.

    The old constructor torch.Tensor(sizes), which DeepSpeed replaces, too, makes tensors on the CPU as ever.
    """

    def __init__(
        self, dtype: torch.dtype | None = None, device: torch.device | str | int = "meta", enabled: bool = True
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._mode = _Placing(dtype, device)

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.enabled:
            self._mode.__exit__(*raised)  # type: ignore[no-untyped-call]


class _Placing(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype | None, device: torch.device | str | int) -> None:
        super().__init__()
        self._dtype = dtype
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func not in _CONSTRUCTORS or options.get("out") is not None:
            return func(*args, **options)
        if options.get("device") is None:
            options["device"] = self._device
        made = func(*args, **options)
        if self._dtype is None or not made.is_floating_point() or made.dtype == self._dtype:
            return made
        return made.detach().to(self._dtype).requires_grad_(made.requires_grad)


__all__ = ["OnDevice"]
