"""Compressed gradients and weights under FSDP2."""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceScatterOptions

from zeropg._native import _C
from zeropg.compression.codec import Codec, check_codec
from zeropg.compression.plan import Plan
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
        self._state = state
        self.residuals = None if state is None else state.residuals
        if state is None:
            self._codec = check_codec(codec, "Fsdp2ReduceScatter")
            self._compressor, self.residuals = self._codec.make_compressor(), self._codec.make_residuals()
        self._group = None if module is None else _parameter_group(module, "Fsdp2ReduceScatter")
        # FSDP2's own objects: they stay where a parameter is replaced.
        self._names = [] if state is None else [state.known_name(each.sharded_param) for each in self._parameters()]
        self._has_warned = False

    @property
    def codec(self) -> Codec | None:
        """What gradients are encoded by now; None: "auto" sends them as they are."""
        return self._codec if self._state is None else self._state.codec

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
        if self._state is not None:
            self._state.begin_bucket()
        codec = self._codec if self._state is None else self._state.codec_of(input_tensor.numel())
        parts = self._parts(input_tensor.numel(), group.size())
        if not parts and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"of {', '.join(self._names)} some got no gradient: such steps do without error feedback", stacklevel=2
            )
        encoded = {part.is_encoded for part in parts} or {True}
        if len(encoded) == 1 or codec is None:  # of one kind: without a copy
            reduces_as = codec if encoded == {True} else None
            work = self._reduce(backend, output_tensor, input_tensor, group.size(), parts, op, reduces_as)
        else:
            work = self._reduce_apart(backend, output_tensor, input_tensor, group.size(), parts, op, codec)
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
        codec: Codec | None,
    ) -> Any:
        ranges = [(part.key, rank * part.numel, part.numel) for rank in range(world_size) for part in parts]
        if self._state is not None:
            self._state.pay(input, ranges, codec)
        if codec is None:
            options = ReduceScatterOptions()
            options.reduceOp = op
            return backend._reduce_scatter_base(output, input, options)
        if self._state is not None:
            encoding, meter = self._state.encoding(codec, ranges), self._state.coding.meter
        else:
            encoding, meter = (self._compressor, self.residuals, ranges), None
        return _C.compressed_reduce_scatter(backend, output, input, *encoding, op, async_op=True, meter=meter)

    def _reduce_apart(
        self,
        backend: Any,
        output: torch.Tensor,
        input: torch.Tensor,
        world_size: int,
        parts: "list[_Part]",
        op: Any,
        codec: Codec,
    ) -> "_Parted":
        """Some parameters travel encoded and some as they are: two calls."""

        def start(columns: torch.Tensor, mine: list[_Part]) -> tuple[Any, torch.Tensor]:
            result = columns.new_empty(columns.shape[1])
            as_codec = codec if mine[0].is_encoded else None
            return self._reduce(backend, result, columns.view(-1), world_size, mine, op, as_codec), result

        return _start_apart(parts, input.view(world_size, -1), output, start)

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


class Fsdp2AllGather:
    """For `FSDPModule.set_custom_all_gather`: one object for each FSDP module.

    for module in model.modules():  # after fully_shard
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Fsdp2AllGather(BlockQuant(8), module))

    codec: e.g. BlockQuant(8), or a Plan whose weights have one; its `exclude` means names in the whole model, or in
      `module`. What the codec loses is not made up for: with 4 bits a model learns worse.
    module: the FSDP module whose parameters these are. Norms, biases and small parameters travel as they are, and so
      does what FSDP2 gathers in another layout: parameters of several dtypes, those whose class or tensor subclass
      has a way of its own (fsdp_pre_all_gather), and the second, smaller sharding of reshard_after_forward=n.

    Each rank computes with what the encoding decodes to, its own part too. The shards that the optimizer updates and
    checkpoints save stay exact. The group is zeropg's.

    Raises TypeError for something that is no codec or plan, ValueError for a codec that loses too much.
    """

    def __init__(self, codec: Codec | Plan, module: "FSDPModule") -> None:
        plan = codec if isinstance(codec, Plan) else Plan(weights=check_codec(codec, "Fsdp2AllGather"))
        if plan.weights is None:
            raise ValueError("[zeropg] Fsdp2AllGather: the plan has no codec for weights; expected Plan(weights=...).")
        self.codec = plan.weights
        self._plan = plan
        self._compressor = self.codec.make_compressor()
        self._group = _parameter_group(module, "Fsdp2AllGather")
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}  # type: ignore[attr-defined]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for FSDP2's flat weights; part of its interface."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gathers `input_tensor` [n] of every rank into `output_tensor` [world_size * n]. Collective.

        Raises ValueError for groups of other backends.
        """
        backend = backend_of(group, "Fsdp2AllGather")

        def start(shard: torch.Tensor, mine: list[_Part]) -> tuple[Any, torch.Tensor]:
            result = shard.new_empty(group.size(), shard.numel())
            if mine[0].is_encoded:
                work = _C.compressed_all_gather(backend, result.view(-1), shard, self._compressor, async_op=True)
                return work, result
            return backend._allgather_base(result.view(-1), shard), result

        # Over a copy: FSDP2's input lies in its output.
        work = _start_apart(self._parts(input_tensor), input_tensor, output_tensor.view(group.size(), -1), start)
        if async_op:
            return work
        work.wait()
        return None

    def _parts(self, input: torch.Tensor) -> "list[_Part]":
        """This rank's columns of FSDP2's tensor; one that travels as it is where they cannot be told."""
        parameters = [] if self._group is None else list(self._group.fsdp_params)
        parts = [
            _Part(
                self._names.get(id(parameter.sharded_param), ""),
                parameter.padded_sharded_param_size.numel(),
                all(self._plan.encodes(name, parameter.sharded_param) for name in self._names_of(parameter)),
            )
            for parameter in parameters
        ]
        has_layout = input.is_floating_point() and sum(part.numel for part in parts) == input.numel()
        return parts if has_layout else [_Part("", input.numel(), False)]

    def _names_of(self, parameter: Any) -> set[str]:
        """In the module, and in the whole model, which FSDP2 knows from its first forward on."""
        own = self._names.get(id(parameter.sharded_param), "")
        return {own, getattr(parameter, "_param_fqn", None) or own}


class _Part(NamedTuple):
    """A parameter's padded shard: of each rank, as many elements of the flat gradients."""

    key: str  # of its residuals
    numel: int
    is_encoded: bool


class _Parted(dist.Work):
    """The Work of several operations whose results belong into one tensor."""

    def __init__(self, works: list[Any], copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._works, self._copies = works, copies

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        for place, result in self._copies:
            place.copy_(result)
        return True


def _start_apart(
    parts: list[_Part],
    input: torch.Tensor,
    output: torch.Tensor,
    start: Callable[[torch.Tensor, list[_Part]], tuple[Any, torch.Tensor]],
) -> _Parted:
    """Starts one call for the parts that travel encoded and one for those that travel as they are.

    The last dimension of `input` and of `output` holds the parts' columns side by side. `start` gets a copy of the
    columns of one kind, and returns the Work and the tensor in which their results will be.
    """
    numels = [part.numel for part in parts]
    columns, places = input.split(numels, dim=-1), output.split(numels, dim=-1)
    works: list[Any] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for is_encoded in (True, False):
        chosen = [index for index, part in enumerate(parts) if part.is_encoded == is_encoded]
        if chosen:
            mine = [parts[index] for index in chosen]
            work, result = start(torch.cat([columns[index] for index in chosen], dim=-1), mine)
            works.append(work)
            results = result.split([part.numel for part in mine], dim=-1)
            copies += zip([places[index] for index in chosen], results, strict=True)
    return _Parted(works, copies)


def _parameter_group(module: "FSDPModule", who: str) -> Any:
    """FSDP2's list of the parameters that `module` reduces; None where it has none itself. TypeError for others."""
    if not hasattr(module, "_get_fsdp_state"):
        raise TypeError(
            f"[zeropg] {who}: the module is a {type(module).__name__} that FSDP2 has not sharded; call "
            "torch.distributed.fsdp.fully_shard first, and pass each FSDPModule."
        )
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.15
    return state._fsdp_param_group if groups is None else next(iter(groups), None)
