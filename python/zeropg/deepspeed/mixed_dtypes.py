"""A forward in which torch refuses to mix two dtypes: what is cast for it, and from then on."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.sharding.buffers import cast_buffers
from zeropg.sharding.nested import tensors_in
from zeropg.sharding.state import ShardedState

LOGGER = logging.getLogger("zeropg")

# Words of torch where it does not mix two dtypes.
_DTYPES_DIFFER = re.compile(r"same dtype|expected scalar type|should be the same|but (got|found) \w+")


class MixedDtypes:
    """What an engine leaves in its own dtype, as labels, masks and tables of positions must not be rounded: floating
    inputs, and floating buffers. DeepSpeed casts buffers with the model.

    keeps_buffers: the configuration says which dtype buffers have.
    """

    def __init__(self, module: nn.Module, state: ShardedState, *, keeps_buffers: bool) -> None:
        self._module = module
        self._state = state
        self._keeps_buffers = keeps_buffers

    def cast_after(self, error: RuntimeError, inputs: Any) -> bool:
        """Casts inputs, or else buffers, from now on where a forward may have failed for theirs, and says so on rank 0.

        Returns whether anything is cast that was not: the forward may be tried again. Nothing communicates.
        """
        dtype = self._state.param_dtype
        if dtype is None or not _DTYPES_DIFFER.search(str(error)):
            return False
        if not self._state.casts_inputs and any(_is_other(tensor, dtype) for tensor in tensors_in(inputs)):
            self._state.casts_inputs = True
            self._say(
                error,
                "inputs of another dtype",
                "inputs are cast from now on, labels and masks too. To keep those, cast the others yourself, as for "
                "DeepSpeed.",
            )
            return True
        if self._keeps_buffers or not any(_is_other(buffer, dtype) for buffer in self._module.buffers()):
            return False
        cast_buffers(self._module, dtype)
        self._say(
            error,
            "buffers of another dtype",
            "buffers are cast now, as DeepSpeed does. To keep some, cast where forward uses them, or say "
            "data_types.buffer_dtype.",
        )
        return True

    def _say(self, error: RuntimeError, refused: str, then: str) -> None:
        if dist.get_rank(self._state.parallel.everybody) == 0:
            LOGGER.warning(
                "[zeropg] forward: the model computes in %s and refuses %s (%s); all floating %s",
                self._state.param_dtype,
                refused,
                str(error).splitlines()[0],
                then,
            )


def _is_other(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype != dtype
