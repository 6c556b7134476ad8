"""What `fully_shard` takes: checks of a rank's own model and options, before ranks compare theirs."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeropg._native import _C
from zeropg.compression.auto import plan_of_auto
from zeropg.compression.plan import Plan, check_plan
from zeropg.compression.state import backend_of
from zeropg.sharding.units import UnitPlan
from zeropg.tensor_parallel.distributed import check_distributed, is_distributed, local_of
from zeropg.tensor_parallel.groups import TensorParallel

_STAGES = (0, 1, 2, 3)


def check_module(module: nn.Module, stage: int, *dtypes: torch.dtype | None) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"[zeropg] fully_shard: expected a torch.nn.Module, got {type(module).__name__}.")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"[zeropg] fully_shard: a {type(module).__name__} has no forward, so nothing would make its parameters "
            "whole; shard the model that contains it, or its children one by one."
        )
    if getattr(module, "_zeropg_state", None) is not None:
        raise ValueError(f"[zeropg] fully_shard: this {type(module).__name__} is sharded already; call it once.")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "[zeropg] fully_shard: called under torch.inference_mode, which makes tensors that no backward can keep; "
            "call it before."
        )
    if stage not in _STAGES:
        raise ValueError(f"[zeropg] fully_shard: stage is {stage!r}; expected 0, 1, 2 or 3.")
    for dtype in dtypes:
        is_one = isinstance(dtype, torch.dtype) and dtype.is_floating_point and not _has_8_bits(dtype)
        if dtype is not None and not is_one:
            raise TypeError(
                f"[zeropg] fully_shard: got dtype {dtype!r}; expected a floating dtype of at least 16 bits, such as "
                "torch.bfloat16."
            )
    lazy = [name for name, tensor in chain(module.named_parameters(), module.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"[zeropg] fully_shard: {', '.join(map(repr, lazy))} of a lazy module have no shape yet; expected them to "
            "have one: run a forward on a small batch first."
        )


def device_of(module: nn.Module, device: torch.device | str | None, group: dist.ProcessGroup) -> torch.device:
    """Where all parameters are or, if they are on `meta`, will be."""
    there = next((p.device for p in module.parameters() if not p.is_meta), None)
    if device is None:
        return there or _default_device(group)
    chosen = torch.empty(0, device=device).device  # with its index
    if chosen.type == "meta" or there not in (None, chosen):
        raise ValueError(
            f"[zeropg] fully_shard: device is {str(device)!r}; expected "
            + ("a device that has memory." if there is None else f"{str(there)!r}, where the model has parameters.")
            + " It says where parameters on `meta` get memory; leave it out for the others."
        )
    return chosen


def _default_device(group: dist.ProcessGroup) -> torch.device:
    devices = [device.type for device in group._device_types]
    if "cuda" in devices and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_parameters(module: nn.Module, plans: list[UnitPlan], param_dtype: torch.dtype | None = None) -> None:
    if not any(plan.parameters for plan in plans):
        raise ValueError(
            f"[zeropg] fully_shard: the {type(module).__name__} has no parameters to shard; expected at least one "
            "(ignored_params do not count)."
        )
    sharded = {id(parameter) for plan in plans for _, parameter in plan.parameters}
    for name, child in module.named_modules():
        if _averages_gradients(child) and any(id(p) in sharded for p in child.parameters()):
            raise ValueError(
                f"[zeropg] fully_shard: {f'the submodule {name!r}' if name else 'the model'} is a "
                f"{type(child).__name__}, and both would average its gradients; expected one of them: pass the model "
                "that was wrapped."
            )
    devices: dict[torch.device, str] = {}
    for plan in plans:
        for names, parameter in plan.parameters:
            if not parameter.is_meta:
                devices.setdefault(parameter.device, names[0])
            if len(devices) > 1:
                raise ValueError(
                    "[zeropg] fully_shard: parameters are on several devices: "
                    f"{', '.join(f'{name!r} on {device}' for device, name in devices.items())}; expected one device "
                    "per rank. Move the model there first (model.to(device)), or name the others in ignored_params."
                )
            if is_distributed(parameter):
                check_distributed(names[0], parameter)
            if _C.is_sharded(local_of(parameter)):
                raise ValueError(
                    f"[zeropg] fully_shard: parameter {names[0]!r} belongs to a sharded model already; shard a "
                    "submodule before the model that contains it, and each model once."
                )
            if is_traceable_wrapper_subclass(parameter) and not is_distributed(parameter):
                raise NotImplementedError(
                    f"[zeropg] fully_shard: parameter {names[0]!r} is a {type(parameter).__name__}, expected a plain "
                    "tensor or a DTensor: what quantization has wrapped cannot be sharded here. Instead of torchao's "
                    "quantize_, zeropg.quantize_frozen(model) packs frozen weights into 4 or 8 bits that are sharded. "
                    "Name others in ignored_params."
                )
            if param_dtype is None and parameter.requires_grad and _has_8_bits(parameter.dtype):
                raise NotImplementedError(
                    f"[zeropg] fully_shard: parameter {names[0]!r} is trainable and {parameter.dtype}, to which "
                    "no step rounds; pass param_dtype=torch.bfloat16, freeze it, or name it in ignored_params."
                )
            if parameter.is_complex() and parameter.requires_grad:
                raise NotImplementedError(
                    f"[zeropg] fully_shard: parameter {names[0]!r} is complex; train its real view "
                    "(torch.view_as_real), freeze it, or name it in ignored_params."
                )


def _has_8_bits(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _averages_gradients(module: nn.Module) -> bool:
    """Whether it is one of torch's wrappers; FSDP2's parameters are DTensors over the same ranks, refused as such."""
    names = {cls.__name__ for cls in type(module).__mro__}  # FSDP's module is slow to import
    return isinstance(module, DistributedDataParallel) or "FullyShardedDataParallel" in names


def plan_of(compression: Any, group: dist.ProcessGroup) -> Plan | None:
    """What may travel encoded."""
    if not isinstance(compression, str):
        return check_plan(compression, "fully_shard")
    if compression != "auto":
        raise TypeError(
            f'[zeropg] fully_shard: compression is {compression!r}; expected "auto", a codec such as '
            "zeropg.compression.BlockQuant(4), or a Plan."
        )
    return plan_of_auto(backend_of(group, "fully_shard"))


def check_chooses_for_all(parallel: TensorParallel) -> None:
    """What "auto" measures, and may choose, are the ranks of one part of the model's tensors."""
    if parallel.dimensions:
        raise NotImplementedError(
            "[zeropg] fully_shard: compression is 'auto', which may choose other codecs for ranks with other parts of "
            "the model's DTensors, and parameters that all of these have whole would become different; expected one "
            "codec for all: zeropg.compression.BlockQuant(4), for instance, or None."
        )


def check_compression(
    plan: Plan,
    plans: list[UnitPlan],
    reduce_dtype: torch.dtype | None,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    backend_of(group, "fully_shard")
    if plan.gradients is not None and reduce_dtype not in (None, torch.float32):
        raise ValueError(
            f"[zeropg] fully_shard: reduce_dtype is {reduce_dtype}, but compression encodes fp32 gradients; leave "
            "reduce_dtype as it is."
        )
    for unit in plans:
        for names, parameter in unit.parameters:
            if parameter.requires_grad and (parameter.dtype == torch.float64 or device.type != "cpu"):
                raise ValueError(
                    f"[zeropg] fully_shard: the gradients of {names[0]!r} are {parameter.dtype} on {device}, and "
                    "cannot be compressed; expected fp32 or 16-bit parameters on the CPU. Shard without compression."
                )


def check_encoded_weights(plan: Plan, stage: int, offloads_masters: bool, has_replicas: bool) -> None:
    if plan.weights is None:
        return
    if has_replicas:
        raise NotImplementedError(
            "[zeropg] fully_shard: weights= of the plan is not available on a mesh that replicates; leave it out. "
            "Weights travel inside a copy of the model alone, and gradients= serves what travels between the copies."
        )
    if stage == 0:
        raise ValueError(
            "[zeropg] fully_shard: the plan has a codec for weights, but in stage 0 no weights travel, since every "
            "rank updates all of them. Leave weights= out, or use stage 1, 2 or 3."
        )
    if stage < 3 and offloads_masters:
        raise ValueError(
            "[zeropg] fully_shard: weights= of the plan sends differences from the masters, which offload_optimizer "
            "keeps on a disk; expected them in memory. Leave one of the two out, or use stage 3."
        )


def encoded_parameters(plan: Plan, units: list[UnitPlan]) -> set[int]:
    """Ids of the parameters that travel encoded."""
    return {id(p) for unit in units for names, p in unit.parameters if plain_name(plan, names, p) is None}


def plain_name(plan: Plan, names: list[str], parameter: nn.Parameter) -> str | None:
    """The name under which the plan leaves a parameter as it is; None for one that travels encoded."""
    return next((name for name in names if not plan.encodes(name, parameter)), None)
