"""Compressed gradients under FSDP2."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceScatterOptions

from zeropg._native import _C
from zeropg.compression.codec import Codec, check_codec
from zeropg.compression.state import State, backend_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Fsdp2ReduceScatter:
    """For `FSDPModule.set_custom_reduce_scatter`: one object for each FSDP module.

    state = State(BlockQuant(4), model=model)  # after fully_shard
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(Fsdp2ReduceScatter(state, module))

    codec: the model's State, which keeps residuals by parameter and saves them. Or a codec, e.g. BlockQuant(4): this
      object then has residuals of its own, which nobody saves.
    module: with a State, the FSDP module whose gradients these are.

    The group is zeropg's; gradients of 16 bits are summed in fp32 and rounded once. With a State a step in which
    trainable parameters of the module got no gradient does without error feedback (torch 2.15 fills them in after
    `set_reduce_scatter_unused_params(True)`).

    Raises TypeError for something that is no codec, for a State without module and the other way round, ValueError for
    parameters that the State does not know.
    """

    def __init__(self, codec: Codec | State, module: "FSDPModule | None" = None) -> None:
        state = codec if isinstance(codec, State) else None
        if (state is None) != (module is None):
            raise TypeError(
                "[zeropg] Fsdp2ReduceScatter: a module and a State belong together; pass Fsdp2ReduceScatter(state, "
                "module), or just a codec."
            )
        if state is not None and state.codec is None:
            raise ValueError(
                '[zeropg] Fsdp2ReduceScatter: "auto" has chosen no compression on this link; leave FSDP2 as it is.'
            )
        self.codec = check_codec(codec if state is None else state.codec, "Fsdp2ReduceScatter")
        self.residuals = self.codec.make_residuals() if state is None else state.residuals
        self._compressor = self.codec.make_compressor()
        self._state = state
        self._group = None if module is None else _parameter_group(module)
        # FSDP2's own objects: they stay where a parameter is replaced.
        self._names = [] if state is None else [state.known_name(each.sharded_param) for each in self._parameters()]
        self._has_warned = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for FSDP2's flat gradients; part of its interface."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduces `input_tensor` [world_size * n] over the ranks into `output_tensor` [n]. Collective.

        Raises ValueError for groups of other backends and for other operations than sum and average, TypeError for
        tensors that are not fp32, fp16 or bf16 on the CPU.
        """
        backend = backend_of(group, "Fsdp2ReduceScatter")
        parts = self._parts(input_tensor.numel(), group.size())
        if not parts and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"of {', '.join(self._names)} some got no gradient: such steps do without error feedback", stacklevel=2
            )
        if all(part.is_encoded for part in parts):
            return self._reduce(backend, output_tensor, input_tensor, group.size(), parts, op, async_op)
        work = self._reduce_apart(backend, output_tensor, input_tensor, group.size(), parts, op)
        if async_op:
            return work
        work.wait()
        return None

    def _reduce(
        self,
        backend: Any,
        output: torch.Tensor,
        input: torch.Tensor,
        world_size: int,
        parts: "list[_Part]",
        op: Any,
        async_op: bool,
    ) -> Any:
        ranges = [(part.key, rank * part.numel, part.numel) for rank in range(world_size) for part in parts]
        if self._state is not None:
            self._state.pay_arrears(input, ranges)
        residuals = self.residuals if ranges else None
        work = _C.compressed_reduce_scatter(
            backend, output, input, self._compressor, residuals, ranges, op, async_op=async_op
        )
        return work if async_op else None

    def _reduce_apart(
        self, backend: Any, output: torch.Tensor, input: torch.Tensor, world_size: int, parts: "list[_Part]", op: Any
    ) -> "_Parted":
        """Some parameters travel encoded and some as they are: two calls over copies of their columns."""
        columns = input.view(world_size, -1).split([part.numel for part in parts], dim=1)
        places = output.split([part.numel for part in parts])
        works: list[Any] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for is_encoded in (True, False):
            chosen = [index for index, part in enumerate(parts) if part.is_encoded == is_encoded]
            if not chosen:
                continue
            flat = torch.cat([columns[index] for index in chosen], dim=1).view(-1)
            result = torch.empty(flat.numel() // world_size, dtype=flat.dtype)
            if is_encoded:
                mine = [parts[index] for index in chosen]
                works.append(self._reduce(backend, result, flat, world_size, mine, op, True))
            else:
                options = ReduceScatterOptions()
                options.reduceOp = op
                works.append(backend._reduce_scatter_base(result, flat, options))
            results = result.split([parts[index].numel for index in chosen])
            copies += zip([places[index] for index in chosen], results, strict=True)
        return _Parted(works, copies)

    def _parameters(self) -> list[Any]:
        return [] if self._group is None else list(self._group.fsdp_params)

    def _parts(self, numel: int, world_size: int) -> "list[_Part]":
        """One rank's columns of FSDP2's tensor of `numel`; nothing where they cannot be told."""
        if self._group is None:  # a tensor without some gradients has residuals of its own
            return [_Part(f"gradients of {numel} on {world_size} ranks", numel // world_size, True)]
        parameters = list(zip(self._parameters(), self._names, strict=True))
        order = getattr(self._group, "_reduce_scatter_param_indices", range(len(parameters)))  # since torch 2.15
        parts = []
        for parameter, name in (parameters[index] for index in order):
            if parameter.sharded_param.requires_grad:
                dim = parameter.fsdp_placement.dim
                # Cut along another dimension, its elements come in an order that depends on the number of parts.
                key = name if dim == 0 else f"{name} in {world_size} parts of dimension {dim}"
                is_encoded = (
                    self._state is None
                    or self._state.plan is None
                    or self._state.plan.encodes(name, parameter.sharded_param)
                )
                parts.append(_Part(key, parameter.padded_sharded_param_size.numel(), is_encoded))
        return parts if world_size * sum(part.numel for part in parts) == numel else []


class _Part(NamedTuple):
    """A parameter's padded shard: of each rank, as many elements of the flat gradients."""

    key: str  # of its residuals
    numel: int
    is_encoded: bool


class _Parted:
    """The Work of several reductions whose results belong into one tensor."""

    def __init__(self, works: list[Any], copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._works, self._copies = works, copies

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for place, result in self._copies:
            place.copy_(result)


def _parameter_group(module: "FSDPModule") -> Any:
    """FSDP2's list of the parameters that `module` reduces; None where it has none itself."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.15
    return state._fsdp_param_group if groups is None else next(iter(groups), None)
