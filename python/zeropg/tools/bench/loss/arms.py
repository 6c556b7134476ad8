"""Who trains: peers from torch, and zeropg with each codec. One line of ARMS each."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeropg
from zeropg.compression import Plan, State, ddp_hook
from zeropg.compression.codec import CODECS, BlockQuant, Codec
from zeropg.compression.coding import Coding
from zeropg.tools.bench.loss.tasks import Task

BASELINE = "ddp gloo fp32"
_VARIANCE_INTERVAL = 10  # of 1-bit Adam
PLAIN = {"gloo": BASELINE, "zeropg": "ddp zeropg fp32"}  # of each backend, the arm that encodes nothing


@dataclass(frozen=True)
class Setup:
    """What an arm is given. The model is new, with the same weights on every rank and for every arm."""

    task: Task
    model: nn.Module
    group: Any
    lr: float
    warm_up_steps: int


@dataclass(frozen=True)
class Trainer:
    """What an arm makes of it: what is called, the update after a backward pass, the codec's counters, and the end."""

    model: Any
    optimizer: torch.optim.Optimizer
    clip: Callable[[], Any]
    coding: Coding | None = None
    close: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Arm:
    """One way to train over one kind of group.

    warm_up_share: of the steps. In them the arm trains as `warm_up` does, an arm of its own; "": as PLAIN.
    cycle: steps after which their kinds repeat.
    tasks: those it can train.
    missing: why it cannot run here; empty where it can.
    """

    backend: str
    make: Callable[[Setup], Trainer]
    warm_up_share: float = 0.0
    warm_up: str = ""
    cycle: int = 1
    tasks: tuple[str, ...] = ("text", "digits")
    missing: Callable[[], str] = lambda: ""

    def warm_up_steps(self, steps: int) -> int:
        """At least 2, which PowerSGD and the second moments need, where there are any."""
        return max(2, round(self.warm_up_share * steps)) if self.warm_up_share else 0

    def whole_cycles(self, steps: int) -> int:
        """So many steps or a few more, in which each kind comes equally often."""
        return -(-steps // self.cycle) * self.cycle

    @property
    def warms_up_as(self) -> str:
        """The arm whose steps its first ones are like."""
        return self.warm_up or PLAIN[self.backend]


def _ddp(setup: Setup) -> DistributedDataParallel:
    return DistributedDataParallel(setup.model, process_group=setup.group)


def _in_one_bucket(setup: Setup) -> DistributedDataParallel:
    """For torch's hooks that call collectives in callbacks: with two buckets their order differs between ranks."""
    return DistributedDataParallel(setup.model, process_group=setup.group, bucket_cap_mb=100)


def _trainer(setup: Setup, ddp: DistributedDataParallel, coding: Coding | None = None) -> Trainer:
    return Trainer(ddp, setup.task.optimizer(setup.model, setup.lr), _clip(setup), coding)


def _clip(setup: Setup) -> Callable[[], Any]:
    norm = setup.task.clip
    return lambda: None if norm is None else nn.utils.clip_grad_norm_(setup.model.parameters(), norm)


def _plain(setup: Setup) -> Trainer:
    return _trainer(setup, _ddp(setup))


def _bf16(setup: Setup) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    ddp = _ddp(setup)
    ddp.register_comm_hook(setup.group, bf16_compress_hook)
    return _trainer(setup, ddp)


def _power_sgd(rank: int) -> Callable[[Setup], Trainer]:
    def make(setup: Setup) -> Trainer:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        ddp = _in_one_bucket(setup)
        state = PowerSGDState(setup.group, matrix_approximation_rank=rank, start_powerSGD_iter=setup.warm_up_steps)
        ddp.register_comm_hook(state, powerSGD_hook)
        return _trainer(setup, ddp)

    return make


def _torch_quantization(setup: Setup) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook

    ddp = _in_one_bucket(setup)
    ddp.register_comm_hook(setup.group, quantization_pertensor_hook)
    return _trainer(setup, ddp)


def _codec(make_codec: Callable[[], Codec]) -> Callable[[Setup], Trainer]:
    def make(setup: Setup) -> Trainer:
        ddp = _ddp(setup)
        state = State(make_codec(), process_group=setup.group, model=setup.model)
        ddp.register_comm_hook(state, ddp_hook)
        return _trainer(setup, ddp, state.coding)

    return make


def _auto(setup: Setup) -> Trainer:
    ddp = _ddp(setup)
    state = State("auto", process_group=setup.group, model=setup.model)
    ddp.register_comm_hook(state, ddp_hook)
    return _trainer(setup, ddp, state.coding)


class _LateNowAndThen(nn.Module):
    """The last rank comes 50 ms late to a step in every second."""

    def __init__(self, model: nn.Module, rank: int, world_size: int) -> None:
        super().__init__()
        self.inner = model
        self._is_late = rank == world_size - 1
        self._next = time.monotonic() + 1

    def forward(self, *inputs: Any) -> Any:
        if self._is_late and self.training and time.monotonic() >= self._next:
            time.sleep(0.05)
            self._next = time.monotonic() + 1
        return self.inner(*inputs)


def _partial(setup: Setup) -> Trainer:
    ddp = _ddp(setup)
    state = zeropg.PartialReduction(setup.group, slow_node_tolerance=1 / setup.task.world_size)
    ddp.register_comm_hook(state, zeropg.partial_hook)
    model = _LateNowAndThen(ddp, setup.task.rank, setup.task.world_size)
    trainer = _trainer(setup, ddp)
    return Trainer(model, trainer.optimizer, trainer.clip, close=state.close)


def _one_bit_adam(setup: Setup) -> Trainer:
    optim = importlib.import_module("zeropg.optim")
    groups = setup.task.optimizer(setup.model, setup.lr).param_groups
    optimizer = optim.OneBitAdam(
        [{"params": each["params"], "weight_decay": each["weight_decay"]} for each in groups],
        lr=setup.lr,
        betas=groups[0]["betas"],
        warmup_steps=setup.warm_up_steps,
        warmup_codec=BlockQuant(4),
        variance_interval=_VARIANCE_INTERVAL,
        clip=setup.task.clip,
    )
    ddp = _ddp(setup)
    optimizer.attach(ddp)
    return Trainer(ddp, optimizer, lambda: None)


def _dgc(setup: Setup) -> Trainer:
    optim = importlib.import_module("zeropg.optim")
    momentum = setup.task.momentum
    optimizer = optim.DGC(
        setup.model.parameters(),
        lr=setup.lr,
        momentum=momentum,
        ratio=0.01,
        weight_decay=setup.task.weight_decay / (1 - momentum),  # DGC's passes no momentum, SGD's does
        clip=setup.task.clip,
    )
    ddp = _ddp(setup)
    optimizer.attach(ddp)
    return Trainer(ddp, optimizer, lambda: None)


def _sharded(make_compression: Callable[[], Any]) -> Callable[[Setup], Trainer]:
    def make(setup: Setup) -> Trainer:
        model: Any = zeropg.fully_shard(setup.model, stage=2, process_group=setup.group, compression=make_compression())
        optimizer = zeropg.shard_optimizer(setup.task.optimizer(model, setup.lr), model)
        norm = setup.task.clip
        clip = (lambda: None) if norm is None else (lambda: zeropg.clip_grad_norm_(model, norm))
        return Trainer(model, optimizer, clip, model._zeropg_state.coding)

    return make


def _no_such_optimizer(name: str) -> Callable[[], str]:
    return lambda: "" if hasattr(importlib.import_module("zeropg.optim"), name) else f"no zeropg.optim.{name} here"


def _arm_of(codec: str, **parameters: Any) -> Arm:
    """DDP with a codec that is made by its name, which a build may lack."""
    classes: dict[str, Any] = {**CODECS}  # whose parameters no type checker knows
    absent = "" if codec in classes else f"this build has no codec {codec}"
    return Arm("zeropg", _codec(lambda: classes[codec](**parameters)), missing=lambda: absent)


def _no_plans() -> str:
    annotation = str(inspect.signature(zeropg.fully_shard).parameters["compression"].annotation)
    return "" if "Plan" in annotation else "fully_shard takes no Plan in this version"


ARMS: dict[str, Arm] = {
    BASELINE: Arm("gloo", _plain),
    "ddp gloo bf16": Arm("gloo", _bf16),
    "ddp gloo powersgd 1": Arm("gloo", _power_sgd(1), warm_up_share=0.1),
    "ddp gloo powersgd 4": Arm("gloo", _power_sgd(4), warm_up_share=0.1),
    "ddp gloo torch int8": Arm("gloo", _torch_quantization),
    PLAIN["zeropg"]: Arm("zeropg", _plain),
    "ddp zeropg auto": Arm("zeropg", _auto),
    "ddp zeropg bf16": _arm_of("bf16"),
    "ddp zeropg int8": Arm("zeropg", _codec(lambda: BlockQuant(8))),
    "ddp zeropg int4": Arm("zeropg", _codec(lambda: BlockQuant(4))),
    "ddp zeropg two_bit": _arm_of("two_bit"),
    "ddp zeropg two_bit rotated": _arm_of("two_bit", rotate=True),
    "ddp zeropg one_bit rotated": _arm_of("one_bit", rotate=True),
    "ddp zeropg top_k 1%": _arm_of("top_k", ratio=0.01),
    "ddp zeropg 1-bit adam": Arm(
        "zeropg",
        _one_bit_adam,
        warm_up_share=0.1,
        warm_up="ddp zeropg int4",
        cycle=_VARIANCE_INTERVAL,
        tasks=("text",),
        missing=_no_such_optimizer("OneBitAdam"),
    ),
    "ddp zeropg dgc 1%": Arm("zeropg", _dgc, tasks=("digits",), missing=_no_such_optimizer("DGC")),
    "ddp zeropg, one rank late": Arm("zeropg", _partial),
    "stage 2 fp32": Arm("zeropg", _sharded(lambda: None)),
    "stage 2 int4": Arm("zeropg", _sharded(lambda: BlockQuant(4))),
    "stage 2 int4, weights int4": Arm(
        "zeropg", _sharded(lambda: Plan(gradients=BlockQuant(4), weights=BlockQuant(4))), missing=_no_plans
    ),
}
