"""Gradients in fewer bytes between ranks: codecs, and how DDP and FSDP2 use them.

A codec is an argument: `zeropg.fully_shard(model, compression=BlockQuant(4))`, `ddp.register_comm_hook(
State(BlockQuant(4)), ddp_hook)`, `fsdp_module.set_custom_reduce_scatter(Fsdp2ReduceScatter(State(BlockQuant(4),
model=model), fsdp_module))`. Nothing else is ever compressed: no parameters, losses, metrics, broadcasts. Gradients
must be fp32 on the CPU, and the group zeropg's.

With error feedback (the default) what an encoding loses is added to the next gradient of the same parameter. Each rank
keeps up to 4 bytes per element for that; they belong into checkpoints (`zeropg.save_checkpoint`, `State.state_dict`). A
step that is skipped loses what its gradient carried of earlier residuals. After a change of the loss scale call
`residuals.scale(new / old)`; `zeropg.GradScaler` does so itself. A NaN or infinity makes its block NaN, on every rank.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from zeropg._native import _C

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["Codec", "Fsdp2ReduceScatter", "State", "ddp_hook"]  # and each codec's class


@dataclass(frozen=True)
class Codec(ABC):
    """How gradients are encoded. Equal codecs on every rank.

    error_feedback: keep what encodings lose and add it to the next gradient.
    """

    error_feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        self.make_compressor()  # refuses bad parameters here, where they are given

    @abstractmethod
    def make_compressor(self) -> _C.Compressor:
        """Returns the core's codec. Raises ValueError for parameters that it does not take."""

    def make_residuals(self) -> _C.ResidualStore | None:
        """Returns an empty store for what encodings lose; None without error feedback."""
        return _C.ResidualStore() if self.error_feedback else None

    def __str__(self) -> str:
        return self.make_compressor().description + (" with error feedback" if self.error_feedback else "")


def _make_class(name: str, help: str, parameters: list[tuple[str, int]]) -> type[Codec]:
    """The class of what compression/registry.cpp calls `name`: "block_quant" becomes BlockQuant(bits=8, block=256)."""

    def make_compressor(self: Codec) -> _C.Compressor:
        return _C.Compressor(name, {key: getattr(self, key) for key, _ in parameters})

    return make_dataclass(
        name.title().replace("_", ""),
        [(key, type(default), default) for key, default in parameters],
        bases=(Codec,),
        namespace={"__doc__": help, "__module__": __name__, "make_compressor": make_compressor},
        frozen=True,
    )


CODECS = {name: _make_class(name, help, parameters) for name, help, parameters in _C.compressors()}
globals().update({codec.__name__: codec for codec in CODECS.values()})
__all__ += [codec.__name__ for codec in CODECS.values()]

if TYPE_CHECKING:

    @dataclass(frozen=True)
    class BlockQuant(Codec):
        bits: int = 8
        block: int = 256

        def make_compressor(self) -> _C.Compressor: ...

    # Codecs whose parameters nobody has written down for type checkers.
    def __getattr__(name: str) -> Any: ...


def named_codecs(block: int = 256) -> dict[str, Codec]:
    """What commands can name: each codec with its defaults; block_quant as int8 and int4."""
    others = {name: codec() for name, codec in CODECS.items() if name != "block_quant"}
    return {"int8": BlockQuant(8, block), "int4": BlockQuant(4, block), **others}


def check_codec(codec: Any, who: str) -> Codec:
    """Returns `codec`. Raises TypeError naming `who` for anything else than a codec, such as the class itself."""
    if not isinstance(codec, Codec):
        raise TypeError(
            f"[zeropg] {who}: compression is {codec!r}; expected a codec such as zeropg.compression.BlockQuant(4)."
        )
    return codec


def backend_of(group: dist.ProcessGroup | None, who: str) -> Any:
    """Returns the zeropg backend of `group` (default: the world). Raises ValueError where it is another one."""
    group = dist.distributed_c10d._get_default_group() if group is None else group
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # no backend for CPU tensors
        backend = None
    if not isinstance(backend, _C.ProcessGroupZero):
        name = "none" if backend is None else backend.name()
        raise ValueError(
            f"[zeropg] {who}: compression needs a group of zeropg, whose collectives carry codecs; the group's CPU "
            f'backend is {name}. Use init_process_group("zeropg"), or no compression.'
        )
    return backend


_RESULT_HOP = 1  # of residuals in units of the average; compression/error_feedback.h


class State:
    """What `ddp_hook` and `Fsdp2ReduceScatter` need: the codec, the group and the residuals of one model on this rank.

    codec: e.g. BlockQuant(4).
    process_group: that of the model; default: the world.
    model: the module that was wrapped by DDP or sharded by FSDP2; its parameters' names then stand in `state_dict`.
      Without it DDP's parameters are numbered in the order of the first buckets.

    Raises TypeError for something that is no codec, ValueError for a group of another backend.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        process_group: dist.ProcessGroup | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        self.codec = check_codec(codec, "State")
        self.residuals = codec.make_residuals()
        self._compressor = codec.make_compressor()
        self._backend = backend_of(process_group, "State")
        # By identity, and kept alive: DDP rebuilds its buckets after the first step, the parameters stay.
        self._names: dict[torch.Tensor, str] = {}
        if model is not None:
            self._names = {parameter: name for name, parameter in model.named_parameters()}
        # By name, in units of this rank's gradient: owed since another world size, so to be paid in the next step.
        self._arrears: dict[str, torch.Tensor] = {}

    def ranges(self, parameters: Sequence[torch.Tensor]) -> list[tuple[str, int, int]]:
        """Whose gradients a bucket of these parameters holds: (name, 0, numel) in its order."""
        for parameter in parameters:
            self._names.setdefault(parameter, f"parameters.{len(self._names)}")
        return [(self._names[parameter], 0, parameter.numel()) for parameter in parameters]

    def known_name(self, parameter: torch.Tensor) -> str:
        """The model's name of its parameter. Raises ValueError where the model does not have it."""
        if parameter not in self._names:
            raise ValueError(
                f"[zeropg] State: the model has no such parameter of shape {tuple(parameter.shape)}; pass the whole "
                "model, after fully_shard: State(codec, model=model)."
            )
        return self._names[parameter]

    def all_reduce(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Any:
        """Averages `buffer` (the flat gradients of `parameters`) over the ranks, in place; returns the Work."""
        ranges = self.ranges(parameters)
        self.pay_arrears(buffer, ranges)
        return _C.compressed_all_reduce(
            self._backend,
            buffer,
            self._compressor,
            self.residuals,
            ranges,
            dist.ReduceOp.AVG,
            async_op=True,
        )

    def pay_arrears(self, gradients: torch.Tensor, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Adds to this rank's flat gradients of `ranges` what another world size left of earlier ones."""
        if not self._arrears:
            return
        offset = 0
        for name, start, numel in ranges:
            if name in self._arrears:
                owed = self._arrears[name][start : start + numel]
                gradients[offset : offset + len(owed)] += owed
            offset += numel
        for name in {name for name, *_ in ranges}:
            self._arrears.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, as copies: {"residuals": [(name, hop, start, tensor)], "world_size", "arrears"}."""
        segments = [] if self.residuals is None else self.residuals.segments()
        return {
            "residuals": [(name, hop, start, values.clone()) for name, hop, start, values in segments],
            "world_size": self._backend.size(),
            "arrears": {name: values.clone() for name, values in self._arrears.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave on the same rank, also under another codec.

        In a world of another size other ranks own other ranges, so what this rank owed the average goes uncompressed
        into its next gradients. What ranks that are gone owed is lost, and new ranks, which load nothing, owe nothing.
        Raises ValueError for residuals that are not finite.
        """
        if self.residuals is None:
            return
        self.residuals.clear()
        self._arrears.clear()
        for name, hop, start, values in state["residuals"]:
            self.residuals.load(name, hop, start, values)
        world_size = self._backend.size()
        former = state.get("world_size", world_size)
        for name, values in state.get("arrears", {}).items():
            self._owe(name, 0, values * (world_size / former))
        if world_size != former:
            for name, hop, start, values in self.residuals.segments():
                self._owe(name, start, values * (world_size if hop == _RESULT_HOP else world_size / former))
            self.residuals.clear()

    def _owe(self, name: str, start: int, values: torch.Tensor) -> None:
        _C.ResidualStore().load(name, 0, start, values)  # refuses what is not finite
        known = self._arrears.get(name, values.new_zeros(0))
        missing = max(0, start + len(values) - len(known))
        self._arrears[name] = torch.cat([known, values.new_zeros(missing)])
        self._arrears[name][start : start + len(values)] += values


def ddp_hook(state: State, bucket: GradBucket) -> Future[torch.Tensor]:
    """The communication hook: `ddp.register_comm_hook(State(BlockQuant(4)), ddp_hook)`. Collective, in backward.

    Two phases, both encoded: every rank sends each shard of the bucket to its owner, which adds them in fp32 and sends
    the average back. All ranks get the same bits. Raises TypeError for gradients that are not fp32 on the CPU.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"[zeropg] ddp_hook: the state is {state!r}; register it as ddp.register_comm_hook(State(codec), ddp_hook)."
        )
    future: Future[list[torch.Tensor]] = state.all_reduce(bucket.buffer(), bucket.parameters()).get_future()
    return future.then(lambda done: done.value()[0])


class Fsdp2ReduceScatter:
    """For `FSDPModule.set_custom_reduce_scatter`: one object for each FSDP module.

    state = State(BlockQuant(4), model=model)  # after fully_shard
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(Fsdp2ReduceScatter(state, module))

    codec: the model's State, which keeps residuals by parameter and saves them. Or a codec, e.g. BlockQuant(4): this
      object then has residuals of its own, which nobody saves.
    module: with a State, the FSDP module whose gradients these are.

    Gradients must be reduced in fp32, `MixedPrecisionPolicy(reduce_dtype=torch.float32)`, on a group of zeropg. With a
    State a step in which trainable parameters of the module got no gradient does without error feedback (torch 2.15
    fills them in after `set_reduce_scatter_unused_params(True)`).

    Raises TypeError for something that is no codec, for a State without module and the other way round, ValueError for
    parameters that the State does not know.
    """

    def __init__(self, codec: "Codec | State", module: "FSDPModule | None" = None) -> None:
        state = codec if isinstance(codec, State) else None
        if (state is None) != (module is None):
            raise TypeError(
                "[zeropg] Fsdp2ReduceScatter: a module and a State belong together; pass Fsdp2ReduceScatter(state, "
                "module), or just a codec."
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
        tensors that are not fp32 on the CPU.
        """
        ranges = self._ranges(input_tensor.numel(), group.size())
        if not ranges and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"of {', '.join(self._names)} some got no gradient: such steps do without error feedback", stacklevel=2
            )
        if self._state is not None:
            self._state.pay_arrears(input_tensor, ranges)
        work = _C.compressed_reduce_scatter(
            backend_of(group, "Fsdp2ReduceScatter"),
            output_tensor,
            input_tensor,
            self._compressor,
            self.residuals if ranges else None,
            ranges,
            op,
            async_op=async_op,
        )
        return work if async_op else None

    def _parameters(self) -> list[Any]:
        return [] if self._group is None else list(self._group.fsdp_params)

    def _ranges(self, numel: int, world_size: int) -> list[tuple[str, int, int]]:
        """Whose gradients FSDP2's tensor of `numel` holds; nothing where that cannot be told."""
        if self._group is None:  # a tensor without some gradients has residuals of its own
            return [(f"gradients of {numel} on {world_size} ranks", 0, numel)]
        parameters = list(zip(self._parameters(), self._names, strict=True))
        order = getattr(self._group, "_reduce_scatter_param_indices", range(len(parameters)))  # since torch 2.15
        parts: list[tuple[str, int]] = []  # one rank's, padded
        for parameter, name in (parameters[index] for index in order):
            if parameter.sharded_param.requires_grad:
                dim = parameter.fsdp_placement.dim
                # Cut along another dimension, its elements come in an order that depends on the number of parts.
                key = name if dim == 0 else f"{name} in {world_size} parts of dimension {dim}"
                parts.append((key, parameter.padded_sharded_param_size.numel()))
        if world_size * sum(part for _, part in parts) != numel:
            return []
        return [(key, rank * part, part) for rank in range(world_size) for key, part in parts]


def _parameter_group(module: "FSDPModule") -> Any:
    """FSDP2's list of the parameters that `module` reduces; None where it has none itself."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.15
    return state._fsdp_param_group if groups is None else next(iter(groups), None)
