"""What stands for a packed weight where programs look for a tensor: its shape, dtype and device, and no values."""

from __future__ import annotations

from typing import Any

import torch

_FACTS = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.is_contiguous,
        torch.Tensor.get_device,
        torch.Tensor.detach,
        torch.Tensor.__len__,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)


class UnreadWeight(torch.Tensor):
    """Says shape, dtype and device; takes no memory. RuntimeError where its values would be read or written.

    So a merge of adapters, which would otherwise add to bytes, says what to do instead.
    """

    weight_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name != "__get__" and func not in _FACTS:
            weight = next((each.weight_name for each in args if isinstance(each, UnreadWeight)), "a weight")
            raise RuntimeError(
                f"[zeropg] {name} on '{weight}', which zeropg.quantize_frozen has packed; expected programs to ask for "
                "its shape, dtype and device alone. To merge adapters or read values, call "
                "zeropg.dequantize_frozen(model) before, on a model that is not sharded."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not isinstance(result, UnreadWeight):  # .data, .T
                result = _named(result, args[0].weight_name)
            return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnreadWeight({self.weight_name!r}, shape={list(self.shape)}, dtype={self.dtype})"


def unread_weight(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns what stands for the weight `name`; one element of memory."""
    return _named(torch.empty(1, dtype=dtype, device=device).expand(shape), name)


def _named(tensor: torch.Tensor, name: str) -> UnreadWeight:
    unread = tensor.as_subclass(UnreadWeight)
    unread.weight_name = name
    return unread
