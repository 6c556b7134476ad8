"""Adam and AdamW whose moments are kept in 32, 16 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeropg._native import _C
from zeropg.optim.checked_groups import CheckedOptimizer, check_numbers

if TYPE_CHECKING:
    from zeropg.optim.kernels import Kernel

_STATE_BITS = (32, 16, 8)


class Adam(CheckedOptimizer):
    """torch.optim.Adam with its two moments in fewer bits: 8, 4 or 2.06 bytes per parameter.

    It runs on zeropg's fused kernels, on the CPU, by itself and through `zeropg.shard_optimizer`, in every stage, also
    with offload_optimizer. All give the same bits. With 32 bits they are torch's to rounding.

    Args:
        params, lr, betas, eps, weight_decay, maximize, decoupled_weight_decay: as torch's.
        state_bits: 16 keeps moments as bfloat16, 8 as codes of a byte in blocks of 32 elements that share an exponent;
          both round stochastically. An option of param groups: `{"params": ..., "state_bits": 32}` for what is small or
          delicate, such as embeddings, norms and biases.

    The update is computed in float32, whatever the bits; masters are float32, and parameters of 16 bits are widened for
    it. Random bits are made of the values and the count of steps: there is no seed, and a run repeats itself.

    `state_dict()` has torch's keys and shapes. Its moments are float32 with 32 bits, else bfloat16, which holds them
    exactly; its param groups say state_bits. `load_state_dict` takes any of them, also torch.optim.AdamW's: the
    optimizer keeps its own state_bits, and rounds what has more to the nearest. In `optimizer.state` 8-bit moments are
    packed (uint8).

    Raises ValueError for options out of range, and for amsgrad. `step` raises NotImplementedError for parameters that
    are not on the CPU, TypeError for float64 with fewer than 32 bits, RuntimeError for sparse gradients.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        state_bits: int = 32,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state_bits": state_bits,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
            "amsgrad": False,
        }
        super().__init__(params, options)

    def check_group(self, group: Mapping[str, Any], *, least_lr: float = 0.0) -> None:
        who = type(self).__name__
        check_numbers(who, group, ["eps", "weight_decay"], ["betas"], least_lr=least_lr)
        if group["state_bits"] not in _STATE_BITS:
            raise ValueError(f"[zeropg] {who}: state_bits is {group['state_bits']!r}, expected 32, 16 or 8")
        if group["amsgrad"]:
            raise ValueError(f"[zeropg] {who}: amsgrad is not available; use torch.optim.{who}")

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's layout. Moments are live tensors, those in 8 bits copies."""
        result: dict[str, Any] = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, entries in result["state"].items():
            result["state"][index] = self.unpacked(parameters[index], entries)
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, or that of torch's Adam or AdamW; state_bits stays as it is."""
        groups = [dict(group) for group in state_dict["param_groups"]]
        for saved, own in zip(groups, self.param_groups, strict=False):  # torch says it if they do not match
            kept = {key: value for key, value in own.items() if key not in saved and key != "params"}
            saved.update(kept, state_bits=own["state_bits"])
        super().load_state_dict({**state_dict, "param_groups": groups})
        for saved, group in zip(groups, self.param_groups, strict=True):
            for index, parameter in zip(saved["params"], group["params"], strict=True):
                if state := self.state.get(parameter):
                    state.update(_as_saved(state_dict["state"][index], parameter.device))
                    self._fit(parameter, state, group)

    def unpacked(self, parameter: torch.Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Returns state of a whole parameter with a value per element, in its shape, for each packed one."""
        return {key: _elements(key, value, parameter) for key, value in entries.items()}

    def update_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        who = f"{type(self).__name__}.step"
        _check(who, parameter, gradient, group)
        kernel = _kernel(group)
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        slots = self._fit(parameter, state, group)
        state["step"] += 1
        # A view, or a copy where it is not contiguous, or in 16 bits.
        master = parameter.detach().to(_master_dtype(parameter)).contiguous()
        kernel.optimizer.step(
            master.view(-1),
            gradient.to(_gradient_dtype(parameter, gradient)).contiguous().view(-1),
            [state[slot.name].view(-1) for slot in slots],
            None,
            range=(0, parameter.numel()),
            hyperparameters=kernel.hyperparameters(group),
            step=int(state["step"].item()),
            gradient_factor=1.0,
        )
        if master.data_ptr() != parameter.data_ptr():
            parameter.copy_(master)

    def _fit(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> list[_C.StateSlot]:
        """Makes the moments what the options of `group` say: from none, or from moments of other bits."""
        kernel = _kernel(group)
        slots: list[_C.StateSlot] = kernel.optimizer.state_slots(kernel.hyperparameters(group))
        for slot in slots:
            dtype = slot.dtype(_master_dtype(parameter))
            there = state.get(slot.name)
            if there is None:
                fresh = torch.zeros(slot.entries(parameter.numel()), dtype=dtype)
                state[slot.name] = fresh if slot.is_packed else fresh.view(parameter.shape)
            elif there.dtype != dtype or not (slot.is_packed or there.is_contiguous()):
                values = _elements(slot.name, there, parameter)
                packed = slot.pack(values) if dtype != torch.float64 else values.double().contiguous()
                state[slot.name] = packed if slot.is_packed else packed.view(parameter.shape)
        return slots


class AdamW(Adam):
    """torch.optim.AdamW with its two moments in fewer bits: `Adam` with decoupled weight decay."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_bits: int = 32,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            state_bits=state_bits,
            maximize=maximize,
            decoupled_weight_decay=True,
        )


def _kernel(group: Mapping[str, Any]) -> Kernel:
    from zeropg.optim.kernels import kernel_of  # which needs this package for its classes

    return kernel_of("zeropg.optim.Adam", group)


def _as_saved(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies of a parameter's state: torch rounds moments to the parameter's dtype, and fp16 has no small squares."""
    copies = {
        key: value.detach().to(device, copy=True)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    }
    if "step" in state:  # a number, in state dicts of old
        copies["step"] = torch.tensor(float(state["step"]))
    return copies


def _elements(key: str, value: Any, parameter: torch.Tensor) -> Any:
    """Returns packed state of a parameter in its shape, as bfloat16; other state as it is."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8:
        return value
    slots = {slot.name: slot for bits in _STATE_BITS for slot in _slots(bits) if slot.is_packed}
    return slots[key].unpack(value, parameter.numel()).view(parameter.shape)


def _slots(state_bits: int) -> list[_C.StateSlot]:
    kernel = _kernel({"decoupled_weight_decay": False, "state_bits": state_bits})
    return kernel.optimizer.state_slots(kernel.optimizer.hyperparameters)


def _master_dtype(parameter: torch.Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _gradient_dtype(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.dtype:
    """What the kernel reads beside that master."""
    is_narrow = parameter.dtype != torch.float64 and gradient.dtype in (torch.bfloat16, torch.float16)
    return gradient.dtype if is_narrow else _master_dtype(parameter)


def _check(who: str, parameter: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]) -> None:
    where = f"a parameter of shape {list(parameter.shape)}"
    if gradient.is_sparse:
        raise RuntimeError(f"[zeropg] {who}: {where} has a sparse gradient; use nn.Embedding with sparse=False")
    if not parameter.is_cpu or is_traceable_wrapper_subclass(parameter):
        raise NotImplementedError(
            f"[zeropg] {who}: {where} is a {type(parameter).__name__} on {parameter.device}; expected plain tensors on "
            "the CPU, or offload_optimizer in fully_shard: use torch.optim's class"
        )
    if not parameter.is_floating_point():
        raise TypeError(f"[zeropg] {who}: {where} is {parameter.dtype}, expected a floating dtype")
    if parameter.dtype == torch.float64 and group["state_bits"] != 32:
        raise TypeError(
            f"[zeropg] {who}: {where} is float64, and its param group says state_bits={group['state_bits']}; use 32"
        )
