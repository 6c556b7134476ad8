"""Linear layers whose weight is packed: only its bytes are kept, and a matrix exists while it is multiplied."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from zeropg.quantization.packed_weight import pack, unpack
from zeropg.quantization.unread_weight import unread_weight


class _PackedLinear(torch.autograd.Function):
    """x [..., in] to [..., out]. Keeps the bytes alone, and unpacks them again for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, layer: PackedLayer
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.layer = layer
        return functional.linear(x, layer.out_by_in(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        (packed,) = ctx.saved_tensors
        x_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = gradient @ ctx.layer.out_by_in(packed, gradient.dtype)
        if ctx.needs_input_grad[2]:
            bias_gradient = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return x_gradient, None, bias_gradient, None


class PackedLayer(nn.Module):
    """Mixed into the class of a layer whose `weight` is packed. `packed_weight`: uint8, frozen, the only copy.

    The forward unpacks it into the input's dtype, or that of autocast.
    """

    packed_weight: nn.Parameter
    bias: nn.Parameter | None
    _plain_class: type[nn.Module]
    _is_transposed: bool  # the weight is [in, out]
    _weight_name: str  # in the model, for messages
    _weight_shape: torch.Size
    _weight_dtype: torch.dtype  # before it was packed

    @property
    def weight(self) -> torch.Tensor:
        """Says shape, dtype and device of the weight; anything that would read or write it raises RuntimeError."""
        return unread_weight(self._weight_name, self._weight_shape, self._weight_dtype, self.packed_weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in], floating. Returns [..., out] in its dtype."""
        if not x.is_floating_point():
            raise TypeError(
                f"[zeropg] '{self._weight_name}' is packed, and its input is {x.dtype}; expected a floating dtype"
            )
        if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):  # as of a plain layer
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return cast(torch.Tensor, _PackedLinear.apply(x, self.packed_weight, bias, self))

    def unpacked_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the weight as a matrix of its own; dtype: default what it had before."""
        return self.unpacked(self.packed_weight.detach(), dtype or self._weight_dtype)

    def out_by_in(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix of `packed`, the bytes of this layer, as functional.linear takes it."""
        weight = self.unpacked(packed, dtype)
        return weight.t() if self._is_transposed else weight

    def extra_repr(self) -> str:
        shape = "x".join(map(str, self._weight_shape))
        return f"weight={shape} packed in {self.packed_weight.numel()} bytes, bias={self.bias is not None}"

    def unpacked(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix of `packed`, the bytes of this layer. ValueError for those of another shape."""
        weight = unpack(packed, dtype)
        if weight.shape != self._weight_shape:
            raise ValueError(
                f"[zeropg] the bytes of '{self._weight_name}' are of a weight {list(weight.shape)}, expected "
                f"{list(self._weight_shape)}: load those of this model"
            )
        return weight


class QuantizedLinear(PackedLayer, nn.Linear):  # type: ignore[override,misc]  # its weight is no parameter
    """An nn.Linear with a packed weight."""

    _plain_class = nn.Linear
    _is_transposed = False


def packed_class(plain: type[nn.Module]) -> type[PackedLayer] | None:
    """Returns the class that packed layers of exactly this class get; None where they cannot be packed."""
    if plain is nn.Linear:
        return QuantizedLinear
    is_conv1d = (plain.__module__, plain.__qualname__) == ("transformers.pytorch_utils", "Conv1D")
    return _packed_conv1d(plain) if is_conv1d else None  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    """For pickle, which finds a class by its module and name."""
    if name == "QuantizedConv1D":
        from transformers.pytorch_utils import Conv1D

        return _packed_conv1d(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _packed_conv1d(plain: type[nn.Module]) -> type[PackedLayer]:
    """Of GPT-2's linear layers, whose weight is [in, out]."""
    attributes = {"_plain_class": plain, "_is_transposed": True, "__module__": __name__}
    return cast("type[PackedLayer]", type("QuantizedConv1D", (PackedLayer, plain), attributes))


def pack_layer(layer: nn.Module, name: str, format: str, block: int) -> None:
    """Packs the layer's weight and lets go of it. The layer stays the same object, of another class."""
    weight = layer._parameters["weight"]
    packed = packed_class(type(layer))
    assert weight is not None and packed is not None  # the caller has looked
    others = {key: parameter for key, parameter in layer._parameters.items() if key != "weight"}
    with torch.inference_mode(False):  # else no backward could keep them
        bytes_of_weight = nn.Parameter(pack(weight, format, block), requires_grad=False)
    layer._parameters = {"packed_weight": bytes_of_weight, **others}
    layer.__class__ = packed
    vars(layer).update(_weight_name=name, _weight_shape=weight.shape, _weight_dtype=weight.dtype)


def unpack_layer(layer: PackedLayer, dtype: torch.dtype | None) -> None:
    """Undoes `pack_layer`, but for what packing has lost."""
    weight = nn.Parameter(layer.unpacked_weight(dtype), requires_grad=False)
    others = {key: parameter for key, parameter in layer._parameters.items() if key != "packed_weight"}
    layer._parameters = {"weight": weight, **others}
    cast(nn.Module, layer).__class__ = layer._plain_class
    for key in ("_weight_name", "_weight_shape", "_weight_dtype"):
        del vars(layer)[key]
