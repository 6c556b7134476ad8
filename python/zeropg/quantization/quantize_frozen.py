"""`quantize_frozen`: packs the frozen weights of a model into 4 or 8 bits, and `dequantize_frozen`: back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeropg.quantization.packed_layer import PackedLayer, pack_layer, packed_class, unpack_layer
from zeropg.quantization.packed_weight import FORMATS, pack

_NOT_BY_DEFAULT = ("lm_head",)


def quantize_frozen(
    model: nn.Module, *, format: str = "nf4", block: int = 64, exclude: Collection[str] = _NOT_BY_DEFAULT
) -> list[str]:
    """Packs the frozen weights of linear layers into 4 or 8 bits, in place: the base of QLoRA. Before `fully_shard`.

    Packed are weights of nn.Linear and of Hugging Face's Conv1D that do not require a gradient and belong to one layer
    alone; embeddings, biases, norms, experts that are no linear layers and subclasses of nn.Linear stay as they are. A
    packed layer is the same object, still an nn.Linear for PEFT, which may have added its adapters before or adds them
    afterwards. It keeps `packed_weight`, a frozen uint8 parameter (4.25 bits per weight with blocks of 64), and
    unpacks it into the dtype of its input when it runs, forward and backward: one weight at a time is whole. In every
    stage ranks keep, shard, gather and save the bytes as they are. Does not communicate; every rank must call it with
    the same arguments, and gets rank 0's bytes in `fully_shard`.

    Args:
        model: any module with values (not on the meta device), on any device; kernels are for CPUs.
        format: "nf4", quantiles of a normal distribution (QLoRA): the best at 4 bits for trained weights; "int4", 15
            even steps; "int8", 255 of them.
        block: consecutive values of a weight that share a scale (bfloat16), a multiple of 32 up to 4096.
        exclude: names, or parts of names between dots, of modules whose layers stay as they are: "lm_head",
            "mlp.gate", "vision_tower".

    Returns:
        The names of the layers that were packed.

    Raises:
        TypeError: `model` is no module, block no integer, or `exclude` a string.
        ValueError: the format or block does not exist, an excluded name is no layer's, the model is sharded or on the
            meta device, a weight holds NaN or infinity, or no weight is frozen. The model is as it was.
    """
    operation = "quantize_frozen"
    _check_model(model, operation)
    if format not in FORMATS:
        raise ValueError(f'[zeropg] {operation}: format is {format!r}, expected "nf4", "int4" or "int8"')
    if type(block) is not int:
        raise TypeError(f"[zeropg] {operation}: block is {block!r}, expected an integer")
    try:
        pack(torch.zeros(1, 1, device="cpu"), format, block)  # refuses the block before anything is packed
    except ValueError as error:
        raise ValueError(f"[zeropg] {operation}: {error}") from None
    layers = _layers_to_pack(model, _checked_names(model, exclude))
    if not layers:
        raise ValueError(
            f"[zeropg] {operation}: no linear layer of this {type(model).__name__} has a frozen weight of its own that "
            "is not excluded; freeze the model first: model.requires_grad_(False)"
        )
    for name, layer in layers.items():
        _check_values(name, layer)
    for name, layer in layers.items():
        pack_layer(layer, f"{name}.weight" if name else "weight", format, block)
    return list(layers)


def dequantize_frozen(model: nn.Module, *, dtype: torch.dtype | None = None) -> list[str]:
    """Gives layers that `quantize_frozen` has packed a plain, frozen weight again, in place; what packing lost is lost.

    For merges and exports: PEFT's `merge_and_unload` needs values that it can add to. Does not communicate.

    Args:
        model: a module that is not sharded; of a sharded one load `zeropg.full_state_dict(model)` into a plain model
            that was quantized alike.
        dtype: of the weights; default: what each had before it was packed.

    Returns:
        The names of the layers that were packed.

    Raises:
        TypeError: `model` is no module, or dtype is not floating.
        ValueError: the model is sharded, or nothing in it is packed.
    """
    operation = "dequantize_frozen"
    _check_model(model, operation)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"[zeropg] {operation}: dtype is {dtype!r}, expected a floating one such as torch.bfloat16")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLayer)}
    if not layers:
        raise ValueError(
            f"[zeropg] {operation}: nothing in this {type(model).__name__} is packed; expected a model on which "
            "zeropg.quantize_frozen was called"
        )
    for layer in layers.values():
        unpack_layer(layer, dtype)
    return list(layers)


def _check_model(model: nn.Module, operation: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"[zeropg] {operation}: expected a torch.nn.Module, got {type(model).__name__}")
    if any("_zeropg_is_unit" in vars(module) for module in model.modules()):
        raise ValueError(
            f"[zeropg] {operation}: this {type(model).__name__} is sharded; call it on a plain model, before "
            "zeropg.fully_shard"
        )


def _checked_names(model: nn.Module, exclude: Collection[str]) -> Collection[str]:
    if isinstance(exclude, str):
        raise TypeError(f"[zeropg] quantize_frozen: exclude is {exclude!r}, expected several names: ({exclude!r},)")
    exclude = tuple(exclude)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    unknown = [part for part in exclude if part not in _NOT_BY_DEFAULT and not any(_has(name, part) for name in names)]
    if unknown:
        raise ValueError(
            f"[zeropg] quantize_frozen: exclude has {', '.join(map(repr, unknown))}, which no module has in "
            "its name; expected whole parts of names between dots"
        )
    return exclude


def _has(name: str, part: str) -> bool:
    return f".{part}." in f".{name}."


def _layers_to_pack(model: nn.Module, exclude: Collection[str]) -> dict[str, nn.Module]:
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    excluded = {
        id(module)
        for name, module in model.named_modules(remove_duplicate=False)
        if any(_has(name, part) for part in exclude)
    } | _adapters(model)
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) not in excluded
        and packed_class(type(module)) is not None
        and (weight := module._parameters.get("weight")) is not None
        and _can_be_packed(weight)
        and owners[id(weight)] == 1
    }


def _adapters(model: nn.Module) -> set[int]:
    """ids of what PEFT's layers hold beside the layer that they wrap: adapters, also where they are frozen."""
    found: set[int] = set()
    for wrapper in model.modules():
        base = wrapper._modules.get("base_layer")
        if base is not None:
            found |= {id(module) for module in wrapper.modules()} - {id(module) for module in base.modules()}
    return found


def _can_be_packed(weight: nn.Parameter) -> bool:
    is_plain = not is_traceable_wrapper_subclass(weight) and weight.dim() == 2
    return is_plain and not weight.requires_grad and weight.is_floating_point()


def _check_values(name: str, layer: nn.Module) -> None:
    weight = layer._parameters["weight"]
    assert weight is not None
    if weight.is_meta:
        raise ValueError(
            f"[zeropg] quantize_frozen: '{name}' is on the meta device and has no values; load the model before"
        )
    if not weight.detach().bfloat16().isfinite().all():  # the dtype of the scales
        raise ValueError(
            f"[zeropg] quantize_frozen: the weight of '{name}' holds NaN or infinity, or values that bfloat16 cannot "
            "hold"
        )
