"""The class that a sharded model and its units have besides the user's own."""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import nn

from zeropg._native import _C
from zeropg.sharding.load_state_dict import load_into
from zeropg.sharding.state import ShardedState
from zeropg.sharding.subclass import subclass_of


class FullyShardedModule(nn.Module):
    """Mixed into the class of a sharded model and of its units; `isinstance(model, zeropg.FullyShardedModule)`."""

    _zeropg_state: ShardedState
    _zeropg: _C.ShardedModule
    _zeropg_unit: tuple[ShardedState, int]  # and its number among the units

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = vars(self).get("_zeropg_unit")
        if unit is None:
            return super().__call__(*args, **kwargs)
        state, index = unit
        return state.run(index, super().__call__, args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module's; `set_to_none=False` zeroes the accumulated gradients, sharded or not."""
        state = getattr(self, "_zeropg_state", None)
        if set_to_none:
            super().zero_grad(set_to_none=True)
        elif state is None:  # a unit, whose model has other gradients too
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad.dtype)
        else:
            state.check_outside_full_gradients("zero_grad(set_to_none=False)")
            state.core.zero_gradients()
            for parameter in state.ignored_parameters():
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's. Waits for weights that a step with overlap_step=True has left on their way; sends nothing.

        With Plan(weights=...) in stages 1 and 2 these are the replicas that the model computes with, and a warning
        says so once; zeropg.full_state_dict has the masters.
        """
        unit = vars(self).get("_zeropg_unit")
        if unit is not None:
            unit[0].core.join_step()
            if not kwargs.get("keep_vars"):
                unit[0].warn_of_replicas()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Sets parameters and buffers from whole tensors, in every stage, as nn.Module's does. All ranks must call.

        Masters take the values in the dictionary's own precision. Raises NotImplementedError with assign=True, and on a
        unit of a sharded model.
        """
        if assign:
            raise NotImplementedError(
                "[zeropg] load_state_dict(assign=True) would replace sharded parameters; use assign=False."
            )
        if not hasattr(self, "_zeropg_state"):
            raise NotImplementedError(
                "[zeropg] load_state_dict on a unit of a sharded model; call it on the model, or "
                "zeropg.load_full_state_dict."
            )
        return load_into(self, state_dict, strict, super().load_state_dict)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            "[zeropg] a sharded model cannot be copied: its memory is shared between ranks. Build a second model and "
            "load zeropg.full_state_dict(model) into it, or copy before fully_shard; for averages of weights, as of "
            "torch.optim.swa_utils, use zeropg.ema(model)."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "[zeropg] a sharded model cannot be pickled. Save zeropg.full_state_dict(model), or export with "
            "zeropg.save_16bit_weights(model, directory)."
        )


# By the user's class: torch.compile makes code for a class, and blocks of one class are to share it. A class of ours is
# kept by its modules alone, and goes with the last of them; the user's then goes as if it had never been sharded.
_SHARDED_CLASSES: WeakValueDictionary[type[nn.Module], type[nn.Module]] = WeakValueDictionary()


def swap_class(module: nn.Module) -> None:
    cls = type(module)
    if not issubclass(cls, FullyShardedModule):
        module.__class__ = _SHARDED_CLASSES.get(cls) or _SHARDED_CLASSES.setdefault(
            cls, subclass_of(cls, FullyShardedModule)
        )
