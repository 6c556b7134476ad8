"""What optimizers that compress the momentum have in common: where they run, their phases, and what they save."""
# Without `from __future__ import annotations`: DistributedDataParallel looks at the types that its hook names.

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from zeropg.compression.codec import Codec, check_codec
from zeropg.compression.ddp import ddp_hook
from zeropg.compression.state import State
from zeropg.optim.checked_groups import CheckedOptimizer
from zeropg.optim.momentum_exchange import MomentumExchange
from zeropg.optim.part import Part

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INSTEAD = (
    "low bits in the momentum need whole momenta on every rank: DistributedDataParallel, or fully_shard(stage=0 or 1). "
    "Elsewhere use torch.optim.AdamW with compression=zeropg.compression.BlockQuant(4), which Adam bears"
)


class MomentumOptimizer(CheckedOptimizer):
    """An optimizer whose ranks average momenta, encoded, where others average gradients.

    Gradients must reach it unaveraged, once its warm-up is over. So it is told of the model:

        ddp = DistributedDataParallel(model)
        optimizer = OneBitAdam(model.parameters(), warmup_steps=1000)
        optimizer.attach(ddp)

    or, with a sharded model, `zeropg.shard_optimizer(optimizer, zeropg.fully_shard(model, stage=1))`.
    """

    # Keys of `state` that are tensors: all; those that are whole on every rank, also where weights are sharded; those
    # that are each rank's own.
    tensor_state: frozenset[str]
    whole_state: frozenset[str]
    own_state: frozenset[str] = frozenset()
    common_options: tuple[str, ...] = ("warmup_steps",)  # one value in all param groups: what decides the phase

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, codec: Codec, warmup_codec: Codec | None, clip: float | None
    ) -> None:
        who = type(self).__name__
        self.codec = check_codec(codec, who)
        self.warmup_codec = None if warmup_codec is None else check_codec(warmup_codec, who)
        if clip is not None and not clip > 0:
            raise ValueError(f"[zeropg] {who}: clip is {clip!r}; expected a norm > 0, or None")
        self.clip = clip
        # What the next step multiplies the gradients by, once: zeropg.GradScaler sets it.
        self.gradient_factor = 1.0
        self.gradients_are_local = False  # since the last backward, which did not average them
        self.exchange: MomentumExchange | None = None
        self._warmup_state: State | None = None
        self._model: torch.nn.Module | None = None
        self._loaded: Mapping[str, Any] | None = None  # what ranks owed, loaded before `attach`
        super().__init__(params, {**defaults, "steps": 0})

    def averages_gradients(self) -> bool:
        """Whether the next step wants averaged gradients: during warm-up at least. The same on all ranks."""
        return self._is_warming_up(self.param_groups[0])

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Takes over the communication of `ddp`: averages gradients where `averages_gradients`, leaves them alone else.

        Once, before the first backward. The optimizer must hold all trainable parameters of `ddp`, since nobody
        averages the others' gradients.

        Raises TypeError for something that is no DistributedDataParallel, ValueError for a group of another backend,
        parameters that do not fit or another hook, RuntimeError for an optimizer that is attached already.
        """
        who = f"{type(self).__name__}.attach"
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"[zeropg] {who}: got a {type(ddp).__name__}, expected a DistributedDataParallel. A model of "
                f"zeropg.fully_shard goes through zeropg.shard_optimizer(optimizer, model). Note that {INSTEAD}"
            )
        if self.exchange is not None:
            raise RuntimeError(f"[zeropg] {who}: this optimizer has a model already; make one for each model")
        self.check_parameters(ddp.module, who)
        self.exchange = self.make_exchange(ddp.module, ddp.process_group)
        if self.warmup_codec is not None:
            self._warmup_state = State(self.warmup_codec, process_group=ddp.process_group, model=ddp.module)
        try:
            ddp.register_comm_hook(self, _hook)
        except RuntimeError as error:
            self.exchange = None
            raise ValueError(
                f"[zeropg] {who}: the DistributedDataParallel has a communication hook already ({error}); make it "
                "without one: this optimizer needs unaveraged gradients, and compresses by itself"
            ) from error
        self._model = ddp.module
        if self._loaded is not None:
            self.load_debts(self._loaded)

    def make_exchange(
        self, model: torch.nn.Module, group: dist.ProcessGroup, *, weights_over: dist.ProcessGroup | None = None
    ) -> MomentumExchange:
        """What the steps over `model` communicate by. Raises ValueError for a group of another backend."""
        return MomentumExchange(self.codec, model, group, weights_over=weights_over)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, until the optimizer has a model: what it averages is fixed then."""
        if getattr(self, "exchange", None) is not None:
            self.refuse_more_parameters()
        super().add_param_group(param_group)
        try:
            self._check_alike(self.param_groups)
        except ValueError:
            self.param_groups.pop()
            raise

    def check_before_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """As for every CheckedOptimizer; RuntimeError for gradients that the wrong phase has left unaveraged."""
        super().check_before_step(groups)
        self._check_alike(groups)
        if self.gradients_are_local and self.averages_gradients():
            raise RuntimeError(
                f"[zeropg] {type(self).__name__}.step: by {' and '.join(self.common_options)} of the param groups this "
                "step wants averaged gradients, but backward left them to each rank; change these options before "
                "warm-up ends, and not between backward and step"
            )

    def _check_alike(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for option in self.common_options:
            if len(values := {group.get(option, 0) for group in groups}) > 1:
                raise ValueError(
                    f"[zeropg] {type(self).__name__}: param groups have {option} "
                    f"{' and '.join(map(str, sorted(values)))}; expected one for all, since gradients are averaged "
                    "together"
                )

    def update_all(self) -> None:
        factor, self.gradient_factor = self.gradient_factor, 1.0
        if self.exchange is None:
            raise RuntimeError(
                f"[zeropg] {type(self).__name__}.step: the optimizer has no model, so gradients would be averaged "
                "twice or never; call optimizer.attach(ddp) after DistributedDataParallel(model), or step what "
                "zeropg.shard_optimizer(optimizer, model) returns"
            )
        self.update(
            [
                Part(parameter, parameter, _dense(parameter.grad), 0, parameter.numel(), group, self.state[parameter])
                for group in self.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ],
            factor,
            self.exchange,
        )

    def update(self, parts: Sequence[Part], gradient_factor: float, exchange: MomentumExchange) -> None:
        """One step over `parts`. Collective."""
        if gradient_factor != 1.0 and parts:
            torch._foreach_mul_([part.gradient for part in parts], gradient_factor)
        if self.clip is not None:
            averaged = self.averages_gradients()
            clip_gradients_(parts, local_clip(self.clip, 1 if averaged else exchange.world_size))
        self._update(parts, exchange)
        for group in self.param_groups:
            group["steps"] += 1

    def refuse_more_parameters(self) -> NoReturn:
        raise RuntimeError(
            f"[zeropg] {type(self).__name__}.add_param_group: the optimizer has its model already, whose other "
            "parameters nobody averages; make it with all parameters"
        )

    def gradients(self) -> list[torch.Tensor]:
        """Those that the next step takes, of all param groups."""
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    @property
    def warmup_state(self) -> State | None:
        """The state of `warmup_codec`, whose residuals are in units of what backward gives."""
        return self._warmup_state

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        raise NotImplementedError(
            "[zeropg] torch.amp.GradScaler cannot see an infinite gradient of another rank; use zeropg.GradScaler"
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch's; "zeropg" beside it is what this rank still owes, so every rank saves its own."""
        state_dict = super().state_dict()
        if self.exchange is not None:
            state_dict["zeropg"] = {"rank": self.exchange.rank, "debts": self.exchange.state.state_dict()}
            if self._warmup_state is not None:
                state_dict["zeropg"]["warmup_debts"] = self._warmup_state.state_dict()
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave on this rank, also in a world of another size.

        What another rank owed is not taken over, with a warning: this rank then owes nothing. Options that decide the
        phase and were unknown when `state_dict` was saved stay as they are. Raises ValueError for another optimizer's.
        """
        self._check_is_own(state_dict)
        own = [{key: group[key] for key in self.common_options if key in group} for group in self.param_groups]
        super().load_state_dict(dict(state_dict))
        for group, options in zip(self.param_groups, own, strict=True):
            group.update({key: value for key, value in options.items() if key not in group})
        self._loaded = state_dict.get("zeropg", {})
        if self.exchange is not None:
            self.load_debts(self._loaded)

    def _check_is_own(self, state_dict: Mapping[str, Any]) -> None:
        for mine, theirs in zip(self.param_groups, state_dict.get("param_groups", ()), strict=False):
            if missing := sorted(set(mine) - set(theirs) - set(self.common_options)):
                who = type(self).__name__
                raise ValueError(
                    f"[zeropg] {who}.load_state_dict: the param groups lack {', '.join(missing)}: this is the state of "
                    f"another optimizer. Load what a {who} has saved, or begin with a new one, whose warm-up learns "
                    "the moments again"
                )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"[zeropg] {type(self).__name__} cannot be copied or pickled; make another one and load its state_dict"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__getstate__()

    @abstractmethod
    def _is_warming_up(self, group: Mapping[str, Any]) -> bool:
        """Whether the next step takes averaged gradients."""

    @abstractmethod
    def _update(self, parts: Sequence[Part], exchange: MomentumExchange) -> None:
        """Applies the optimizer's rule; gradients are clipped."""

    def load_debts(self, saved: Mapping[str, Any]) -> None:
        """Takes over what this rank owed: {"rank", "debts"} of a state_dict, or {} for nothing."""
        assert self.exchange is not None
        is_own = saved.get("rank") == self.exchange.rank
        if saved and not is_own:
            warnings.warn(
                f"[zeropg rank {self.exchange.rank}/{self.exchange.world_size}] {type(self).__name__}.load_state_dict: "
                f"this is the state of rank {saved['rank']}, whose debts are not this rank's; save and load each "
                "rank's own, or what ranks still owed is lost",
                stacklevel=3,
            )
        nothing = {"residuals": [], "world_size": self.exchange.world_size}
        self.exchange.state.load_state_dict(saved["debts"] if is_own else nothing)
        if self._warmup_state is not None:
            self._warmup_state.load_state_dict(saved.get("warmup_debts", nothing) if is_own else nothing)
        self._loaded = None

    def check_parameters(self, model: torch.nn.Module, who: str) -> None:
        """Raises ValueError where the optimizer does not hold what it must average, NotImplementedError for dtypes."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        held = {id(parameter): parameter for group in self.param_groups for parameter in group["params"]}
        missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if missing:
            raise ValueError(
                f"[zeropg] {who}: the optimizer lacks {len(missing)} trainable parameters of the model "
                f"({', '.join(missing[:3])}), whose gradients nobody would average; expected all of them in one "
                "optimizer. Freeze them first, or add them to its param groups"
            )
        if strangers := [list(p.shape) for key, p in held.items() if key not in names]:
            raise ValueError(
                f"[zeropg] {who}: {len(strangers)} parameters of the optimizer are not the model's (shapes "
                f"{strangers[:3]}); expected the model's, as they are now"
            )
        for key, parameter in held.items():
            if parameter.device.type != "cpu" or parameter.dtype not in _DTYPES:
                raise NotImplementedError(
                    f"[zeropg] {who}: {names[key]!r} is {parameter.dtype} on {parameter.device}; momenta are "
                    "compressed for fp32, fp16 and bf16 on the CPU. Use torch.optim.AdamW there"
                )


def _hook(optimizer: MomentumOptimizer, bucket: GradBucket) -> Future[torch.Tensor]:
    """The communication hook of an attached model."""
    assert optimizer.exchange is not None
    optimizer.gradients_are_local = not optimizer.averages_gradients()
    if optimizer.gradients_are_local:
        future: Future[torch.Tensor] = Future()
        future.set_result(bucket.buffer())
        return future
    if optimizer._warmup_state is not None:
        return ddp_hook(optimizer._warmup_state, bucket)
    return allreduce_hook(optimizer.exchange.group, bucket)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.is_sparse:
        raise NotImplementedError(
            "[zeropg] step: a gradient is sparse, whose places differ between ranks; use nn.Embedding with sparse=False"
        )
    return gradient


def local_clip(clip: float, world_size: int) -> float:
    """The norm to which each of `world_size` ranks clips its own gradient where `clip` is meant for the average.

    Deep Gradient Compression (Lin et al. 2018), section 3.2: thr / sqrt(N) for what a rank contributes, which there is
    gradient / N; so thr * sqrt(N) for the gradient. Independent gradients then average to norm `clip` at most.
    """
    return clip * math.sqrt(world_size)


def clip_gradients_(parts: Sequence[Part], clip: float) -> None:
    """Scales all gradients so that their total norm is at most `clip`, by torch.nn.utils.clip_grad_norm_'s rule."""
    gradients = [part.gradient for part in parts]
    if gradients:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (clip / (norm + 1e-6)).clamp(max=1.0))
