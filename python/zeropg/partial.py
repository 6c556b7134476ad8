"""Averages of gradients that do not wait for slow nodes."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, GradBucket
from torch.futures import Future

from zeropg._native import _C
from zeropg.backend import group_like, unwrapped_backend
from zeropg.rank_io.agreement import check_same, together

_CPU = torch.device("cpu")
_NO_DEADLINE = timedelta(days=365)
_MOST_PATIENCE = 100
_ARRANGING_STEPS = 2  # DDP rebuilds its buckets once: before the second step, with static_graph before the third


class PartialReduction:
    """Averages gradients over the ranks without waiting for late ones: their gradients count one step later.

    Opt-in, for gradients. In each step all ranks get the same bits, as from an all-reduce. A rank that comes too late
    gets the average at once, and what it computed is added to its next contribution, so every gradient counts once.
    This helps where ranks take turns at being slow (inputs of unlike sizes, other work on a machine); where one rank
    is always the slowest, all come to wait for it. A thread of each rank takes part while the rank computes; nothing
    can take part for a process that is stopped.

        state = zeropg.PartialReduction(slow_node_tolerance=0.25)
        ddp.register_comm_hook(state, zeropg.partial_hook)   # or, in a loop of your own: state.average_(gradients)
        ...
        state.close()

    process_group: of zeropg; default: the world. All its ranks make it, with the same arguments.
    slow_node_tolerance: up to this share of the ranks, in [0, 1), may miss a step. 0.1 of 8 ranks is none.
    max_steps_behind: a rank may miss this many steps one after the other; then the others wait for it.
    patience: how long a step waits for the last ranks when enough are there, as a share of a step's time (the median of
      the last ones). The first step waits for all.

    A late gradient has the loss scale of its own step: with fp16's dynamic loss scaling it counts twice or half when
    the scale has changed meanwhile. Use bf16, or a fixed scale.

    Attributes, the same on all ranks after a step:
    contributors: how many ranks contributed to it what they had computed for it; of its tensors, the fewest.
    missed: {rank: of how many tensors so far its gradient came late}.

    Raises ValueError for arguments out of range and groups of other backends. Later, ValueError on every rank in the
    first step where ranks have other arguments or tensors than rank 0, DistBackendError on every rank when a rank dies
    or leaves, or does not come to a step within the group's timeout; rank 0's names it.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        slow_node_tolerance: float = 0.1,
        max_steps_behind: int = 1,
        patience: float = 0.05,
    ) -> None:
        if not (isinstance(slow_node_tolerance, int | float) and 0 <= slow_node_tolerance < 1):
            raise ValueError(
                f"[zeropg] PartialReduction: slow_node_tolerance is {slow_node_tolerance!r}; expected a share of the "
                "ranks, at least 0 and less than 1."
            )
        if not (isinstance(max_steps_behind, int) and max_steps_behind >= 1):
            raise ValueError(
                f"[zeropg] PartialReduction: max_steps_behind is {max_steps_behind!r}; expected an integer >= 1."
            )
        if not (isinstance(patience, int | float) and 0 <= patience <= _MOST_PATIENCE):
            raise ValueError(
                f"[zeropg] PartialReduction: patience is {patience!r}; expected a number from 0 to {_MOST_PATIENCE}."
            )
        group = dist.group.WORLD if process_group is None else process_group
        if group is None or not isinstance(unwrapped_backend(group, _CPU), _C.ProcessGroupZero):
            raise ValueError(
                "[zeropg] PartialReduction: the group's CPU backend is not zeropg; expected a group that "
                'init_process_group(backend="zeropg") or new_group has made.'
            )
        self._group = group
        self._tolerance, self._max_steps_behind = float(slow_node_tolerance), max_steps_behind
        self._patience = float(patience)
        self._reducer: Any = None
        self._owed: list[torch.Tensor] = []  # loaded before the sizes are known
        self._tensors: list[tuple[int, torch.dtype]] = []  # of each step
        self._parameters: set[int] = set()  # of a DDP
        self._steps = 0  # of it
        self._buckets: list[list[int]] = []  # the parameters in those of its last step, and of this one so far
        self._so_far: list[list[int]] = []
        self._so_far_tensors: list[tuple[int, torch.dtype]] = []
        self._pending: list[tuple[int, torch.Tensor, Future[torch.Tensor]]] = []
        self.contributors = group.size()
        self.missed = dict.fromkeys(range(group.size()), 0)

    @torch.no_grad()
    def average_(self, gradients: Sequence[torch.Tensor]) -> int:
        """Makes each tensor the average over the ranks, in place, and returns how many ranks contributed.

        gradients: a step's, of floats on the CPU; in every step as many, in one order and with the same sizes, on all
          ranks. fp16 and bf16 are summed in fp32. Each rank calls it once in a step, at its own time.
        """
        tensors = list(gradients)
        found = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        if self._reducer is None:
            self._start(found)
        elif found != self._tensors:
            raise ValueError(
                f"[zeropg rank {self._group.rank()}/{self._group.size()}] PartialReduction.average_: a step's tensors "
                f"(elements, dtype) are {found}; in the first step they were {self._tensors}. Give the same ones in "
                "every step, zeros for gradients that are missing."
            )
        rounds = [self._reducer.post(tensor) for tensor in tensors]
        return self._finish(list(zip(rounds, tensors, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """What ranks owe each other, for a checkpoint. Collective, between steps; the same on all ranks."""
        owed = [] if self._reducer is None else self._reducer.owed()
        return {"owed": owed or [each.clone() for each in self._owed], "ranks": self._group.size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Owes what was owed, at another number of ranks too. Every rank calls it, before its first step.

        Raises ValueError after the first step. Where the tensors of the first step are others than those of the
        checkpoint, that step raises ValueError on every rank.
        """
        if self._reducer is not None:
            raise ValueError(
                "[zeropg] PartialReduction.load_state_dict: steps were made already, and what is owed by them would "
                "count as well; load into a new one."
            )
        scale = self._group.size() / state["ranks"]  # averages divide by the number of ranks
        self._owed = [each * scale for each in state["owed"]]

    def close(self) -> None:
        """Ends it, before the groups are destroyed. Collective. What is still owed is lost: see state_dict.

        One that is dropped without it aborts the groups that it has made: torch then says on each rank that it dumps a
        trace, and other ranks' next step raises DistBackendError.
        """
        if self._reducer is not None:
            self._reducer.close()

    def _start(self, tensors: Sequence[tuple[int, torch.dtype]]) -> None:
        """Collective: makes two groups like the given one, once all ranks are known to mean the same."""
        self._compare_with_other_ranks(tensors)
        rounds, messages = group_like(self._group, _CPU), group_like(self._group, _CPU)
        timeout = unwrapped_backend(self._group, _CPU).options._timeout
        unwrapped_backend(messages, _CPU)._set_default_timeout(_NO_DEADLINE)
        self._reducer = _C.PartialReducer(
            rounds,
            messages,
            [numel for numel, _ in tensors],
            in_float64=any(dtype == torch.float64 for _, dtype in tensors),
            tolerance=self._tolerance,
            max_steps_behind=self._max_steps_behind,
            patience=self._patience,
            timeout=timeout,
        )
        self._tensors = list(tensors)
        owed, self._owed = self._owed, []
        if owed and self._group.rank() == 0:  # the sum is owed once
            self._reducer.owe(owed)

    def _compare_with_other_ranks(self, tensors: Sequence[tuple[int, torch.dtype]]) -> None:
        announced = together(self._group, "PartialReduction", lambda: self._announcement(tensors))
        check_same(self._group, "PartialReduction", [each["arguments"] for each in announced])
        numbered = [{f"tensor {i} of a step": text for i, text in enumerate(each["tensors"])} for each in announced]
        check_same(self._group, "PartialReduction", numbered)

    def _announcement(self, tensors: Sequence[tuple[int, torch.dtype]]) -> dict[str, Any]:
        """What must be the same on all ranks. Raises for tensors that cannot be averaged."""
        if any(not dtype.is_floating_point for _, dtype in tensors) or not tensors:
            raise TypeError(f"expected gradients of floats, got {[str(dtype) for _, dtype in tensors]}")
        if self._owed and [each.numel() for each in self._owed] != [numel for numel, _ in tensors]:
            raise ValueError(
                f"the checkpoint has what is owed for tensors of {[each.numel() for each in self._owed]} elements, a "
                f"step here has {[numel for numel, _ in tensors]}; train the same parameters in the same buckets, or "
                "leave it out"
            )
        return {
            "arguments": {
                "slow_node_tolerance": repr(self._tolerance),
                "max_steps_behind": repr(self._max_steps_behind),
                "patience": repr(self._patience),
                "the number of a step's tensors": str(len(tensors)),
            },
            "tensors": [f"{numel} elements, {dtype}" for numel, dtype in tensors],
        }

    def _finish(self, rounds: Sequence[tuple[int, torch.Tensor]]) -> int:
        self.contributors = self._group.size()
        for round_, tensor in rounds:
            contributed = self._reducer.wait(round_, tensor)
            self.contributors = min(self.contributors, sum(contributed))
            for rank, came in enumerate(contributed):
                self.missed[rank] += not came
        return self.contributors

    def _take_bucket(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Exact while DDP still arranges its buckets, which is in the first steps."""
        buffer = bucket.buffer()
        parameters = [id(parameter) for parameter in bucket.parameters()]
        self._check_bucket(parameters)
        self._so_far.append(parameters)
        self._so_far_tensors.append((buffer.numel(), buffer.dtype))
        future: Future[torch.Tensor] = Future()
        if self._reducer is None:
            self._group.allreduce([buffer], _average()).wait()
            future.set_result(buffer)
        else:
            self._pending.append((self._reducer.post(buffer), buffer, future))
        if bucket.is_last():
            pending, self._pending = self._pending, []
            self._finish([(round_, buffer) for round_, buffer, _ in pending])
            for _, buffer, future_ in pending:
                future_.set_result(buffer)
            self._steps += 1
            self._parameters.update(*self._so_far)
            if self._reducer is None and self._steps > _ARRANGING_STEPS and self._so_far == self._buckets:
                self._start(self._so_far_tensors)
            self._buckets, self._so_far, self._so_far_tensors = self._so_far, [], []
        return future

    def _check_bucket(self, parameters: list[int]) -> None:
        """DDP may move parameters from bucket to bucket, but it never has others. Raises RuntimeError."""
        context = f"[zeropg rank {self._group.rank()}/{self._group.size()}] partial_hook: "
        if self._parameters and not self._parameters.issuperset(parameters):
            raise RuntimeError(
                f"{context}a bucket has parameters that this PartialReduction's first step did not have, so another "
                "DDP has it too, and their steps would be mixed up; make a PartialReduction for each DDP."
            )
        if self._reducer is not None and [*self._so_far, parameters] != self._buckets[: len(self._so_far) + 1]:
            raise RuntimeError(
                f"{context}the buckets of this step are not those of the step before: DDP has rebuilt them, or the "
                "last backward did not come to its end. Make a new PartialReduction, and register it with a new DDP."
            )


def partial_hook(state: PartialReduction, bucket: GradBucket) -> Future[torch.Tensor]:
    """DDP's communication hook: `ddp.register_comm_hook(zeropg.PartialReduction(...), zeropg.partial_hook)`.

    Each DDP has a state of its own. The first three or four steps, in which DDP arranges its buckets, wait for all
    ranks. So does whatever else of a program is collective in a step, such as the buffers that DDP broadcasts
    (`broadcast_buffers=False`) or a mean of losses.

    Raises RuntimeError for the buckets of a second DDP, and where DDP rebuilds its buckets later.
    """
    if not isinstance(state, PartialReduction):
        raise TypeError(
            f"[zeropg] partial_hook: the state is {state!r}; register it as "
            "ddp.register_comm_hook(zeropg.PartialReduction(), zeropg.partial_hook)."
        )
    return state._take_bucket(bucket)


def _average() -> Any:
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    return options
