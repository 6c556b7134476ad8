"""What a compressed reduction keeps between steps: what its encodings have lost, by parameter."""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from zeropg._native import _C
from zeropg.compression.auto import Auto, plan_of_auto
from zeropg.compression.codec import Codec, check_codec
from zeropg.compression.coding import Coding
from zeropg.compression.plan import Plan, check_plan, say_what_is_not_encoded
from zeropg.rank_io.agreement import check_same, together


def backend_of(group: dist.ProcessGroup | None, who: str) -> Any:
    """Returns the zeropg backend of `group` (default: the world). Raises ValueError where it is another one."""
    group = dist.distributed_c10d._get_default_group() if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"[zeropg] {who}: the group is {group!r}, expected a ProcessGroup or None.")
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


# Of residuals in units of this rank's gradient, of the average, and again of this rank's; compression/error_feedback.h.
CONTRIBUTION_HOP, RESULT_HOP, ARREARS_HOP = 0, 1, 2
_MOST_NAMED = 4  # in a warning
_CALLS = 100  # from one look at the link to the next


def _check_saved(state: Any) -> None:
    """Raises ValueError for what `State.state_dict` does not give."""
    wrong = None
    if not isinstance(state, Mapping) or not isinstance(state.get("residuals"), Sequence):
        wrong = f"got {_abridged(state)}"
    elif not isinstance(state.get("world_size", 1), int) or state.get("world_size", 1) < 1:
        wrong = f"its world_size is {state['world_size']!r}"
    else:
        wrong = next(
            (f"of its residuals one is {_abridged(one)}" for one in state["residuals"] if not _is_one(one)), None
        )
    if wrong is None:
        spoiled = next((name for name, *_, values in state["residuals"] if not values.isfinite().all()), None)
        wrong = None if spoiled is None else f"the residuals of {spoiled!r} are not finite"
    if wrong is not None:
        raise ValueError(
            f"[zeropg] State.load_state_dict: {wrong}; expected what state_dict() gave, with finite residuals. "
            "This state is as it was."
        )


def _is_one(entry: Any) -> bool:
    if not isinstance(entry, Sequence) or len(entry) != 4:
        return False
    name, hop, start, values = entry
    return (
        isinstance(name, str)
        and hop in (CONTRIBUTION_HOP, RESULT_HOP, ARREARS_HOP)
        and isinstance(start, int)
        and start >= 0
        and isinstance(values, torch.Tensor)
        and values.dtype == torch.float32
        and values.dim() == 1
    )


def _abridged(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class State:
    """What `ddp_hook` and `Fsdp2ReduceScatter` need: the codec, the group and the residuals of one model on this rank.

    codec: e.g. BlockQuant(4), a Plan whose gradients have one, or "auto": what is fastest on this link, measured now
      and again when reductions become slower or faster (then collective; rank 0 says what it chose and why). Small
      buckets may get a codec that loses less.
    process_group: that of the model; default: the world.
    model: the module that was wrapped by DDP or sharded by FSDP2; its parameters' names then stand in `state_dict`, and
      a plan's `exclude` means these. Without it DDP's parameters are numbered in the order of the first buckets.

    Raises TypeError for something that is no codec, ValueError for a group of another backend, and on every rank where
    some have "auto" and others a codec.
    """

    def __init__(
        self,
        codec: Codec | Plan | Literal["auto"],
        *,
        process_group: dist.ProcessGroup | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        is_auto = isinstance(codec, str) and codec == "auto"
        given = None if is_auto else check_plan(codec, "State")
        self.backend = backend_of(process_group, "State")
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"[zeropg] State: model is a {type(model).__name__}, expected the torch.nn.Module.")
        self._group = dist.distributed_c10d._get_default_group() if process_group is None else process_group
        self._is_compared = False  # whether all ranks are known to have this plan
        self._auto: Auto | None = None
        self._compressors: dict[Codec, _C.Compressor] = {}
        if given is not None and given.gradients is None:
            raise ValueError("[zeropg] State: the plan has no codec for gradients; expected Plan(gradients=...).")
        self.plan = given
        if is_auto:
            self._compare_plans()
            self._auto = Auto(self.backend, [self.backend], calls=_CALLS)
            self.plan = plan_of_auto(self.backend)
        # Also without error feedback: what was lost under another codec is paid.
        self.residuals = _C.ResidualStore()
        self.coding = Coding(backend=self.backend, residuals=self.residuals, describe=self._describe)
        # By identity, and kept alive: DDP rebuilds its buckets after the first step, the parameters stay.
        self._names: dict[torch.Tensor, str] = {}
        self._has_model = model is not None
        if model is not None:
            model = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
            self._names = {parameter: name for name, parameter in model.named_parameters()}
            if self.backend.rank() == 0 and self.plan is not None:
                how = "auto" if is_auto else str(self.plan)
                say_what_is_not_encoded(self.plan, model.named_parameters(), how=how)
        self._unnamed: dict[tuple[int, ...], weakref.ref[torch.Tensor]] = {}  # the last one of each shape
        self._numels: dict[str, int] = {}  # of tensors that callers have named
        self._owing: set[str] = set()  # names that may have residuals
        self._summed: set[str] = set()  # names whose tensors were added up last time, and not averaged

    @property
    def is_auto(self) -> bool:
        return self._auto is not None

    @property
    def codec(self) -> Codec | None:
        """What gradients are encoded by now; with "auto" those of large buckets. None: as they are."""
        if self._auto is not None:
            return self._auto.choice.codec
        return None if self.plan is None else self.plan.gradients

    def codec_of(self, numel: int) -> Codec | None:
        """What a bucket of `numel` gradients is encoded by now; None: it travels as it is."""
        return self.codec if self._auto is None else self._auto.choice.codec_of(numel)

    def use(self, codec: Codec) -> None:
        """Encodes with `codec` from the next call on; what earlier encodings lost stays owed."""
        if codec != self.codec:
            gradients = check_codec(codec, "State")
            self.plan = Plan(gradients=gradients) if self.plan is None else replace(self.plan, gradients=gradients)
            self._auto = None
            self._is_compared = False

    def _describe(self) -> str:
        return "as they are" if self.codec is None else self.codec.make_compressor().description

    def begin_bucket(self) -> None:
        """Before each bucket: compares the ranks' plans once; with "auto" measures again at times. Collective then.

        Raises ValueError, on every rank, where ranks have different plans: they would mix what they encode.
        """
        if not self._is_compared:
            self._compare_plans()
        if self._auto is not None:
            self._auto.next_call()

    def _compare_plans(self) -> None:
        plan = "auto" if self.plan is None else repr(self.plan)
        announced = together(self._group, "State", lambda: {"the plan": plan})
        check_same(self._group, "State", announced)
        self._is_compared = True

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

    def name_of(self, tensor: torch.Tensor, name: str | None) -> str:
        """Whose residuals `tensor` has, as `all_reduce` says. Raises ValueError where that is unclear."""
        if name is not None:
            self._check_numel(name, tensor.numel())
            return name
        for parameter, known in self._names.items():
            if parameter.grad is tensor or parameter is tensor:
                return known
        shape = tuple(tensor.shape)
        last = self._unnamed.get(shape, lambda: None)()
        if last is not None and last is not tensor and last.data_ptr() != tensor.data_ptr():
            raise ValueError(
                f"[zeropg] compression.all_reduce: two tensors of shape {shape} share one state, which cannot tell "
                'whose residuals are whose; give each a name: all_reduce(tensor, codec, state=state, name="encoder").'
            )
        self._unnamed[shape] = weakref.ref(tensor)
        return f"tensor of shape {list(shape)}"

    def _check_numel(self, name: str, numel: int) -> None:
        owes = self.codec is None or self.codec.error_feedback
        before = self._numels.setdefault(name, numel)
        if owes and numel != before:
            raise ValueError(
                f"[zeropg] compression.all_reduce: the tensor {name!r} has {numel} elements, and one of the same name "
                f"and state had {before}; what that one has lost would be added to this one. Give each a name of its "
                "own, or a state."
            )

    def check_serves(self, codec: Codec | None, group: dist.ProcessGroup | None) -> None:
        """Raises ValueError where this state was made for another codec or another group."""
        if codec != self.codec:
            raise ValueError(
                f"[zeropg] compression.all_reduce: the state was made for {self.codec}, the call has {codec}; pass the "
                "state's codec, or make a state for this one."
            )
        if group is not None and backend_of(group, "compression.all_reduce") is not self.backend:
            raise ValueError(
                "[zeropg] compression.all_reduce: the state was made for another process group; pass "
                "State(codec, process_group=group)."
            )

    def encodes(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of this parameter travels encoded. Raises ValueError where its name would matter."""
        if self.plan is not None and self.plan.exclude and not self._has_model:
            raise ValueError(
                "[zeropg] State: the plan excludes parameters by name, and the state knows no names; pass the module "
                "that was wrapped: State(plan, model=model)."
            )
        return self.plan is not None and self.plan.encodes(self._names.get(parameter, ""), parameter)

    def all_reduce(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Any:
        """Averages `buffer` (the flat gradients of `parameters`) over the ranks, in place; returns the Work."""
        return self.reduce_ranges(buffer, self.ranges(parameters), dist.ReduceOp.AVG, async_op=True)

    def reduce_ranges(
        self, tensor: torch.Tensor, ranges: Sequence[tuple[str, int, int]], op: Any, *, async_op: bool
    ) -> Any:
        """Reduces `tensor`, which holds `ranges` in their order, over the ranks, in place. Returns what the core does.

        Arrears are added to what this rank contributes.
        """
        codec = self.codec_of(tensor.numel())
        names = {name for name, *_ in ranges}
        self._follow_operation(names, is_sum=op == dist.ReduceOp.SUM)
        self.pay(tensor, ranges, codec)
        if codec is None:
            return self._reduce_plain(tensor, op, async_op)
        return _C.compressed_all_reduce(
            self.backend, tensor, *self.encoding(codec, ranges), op, async_op=async_op, meter=self.coding.meter
        )

    def _reduce_plain(self, tensor: torch.Tensor, op: Any, async_op: bool) -> Any:
        options = AllreduceOptions()
        options.reduceOp = op
        work = self.backend.allreduce([tensor], options)
        if async_op:
            return work
        work.wait()
        return None

    def _follow_operation(self, names: set[str], *, is_sum: bool) -> None:
        """Of names whose tensors were averaged and are summed now, or the other way round, results have new units."""
        changed = names - self._summed if is_sum else names & self._summed
        for name in changed:
            for *_, start, values in self.residuals.take(name, RESULT_HOP):
                self.residuals.owe(name, start, values * (self.backend.size() if is_sum else 1))
        self._summed = self._summed | names if is_sum else self._summed - names

    def encoding(
        self, codec: Codec, ranges: Sequence[tuple[str, int, int]]
    ) -> tuple[_C.Compressor, _C.ResidualStore | None, list[tuple[str, int, int]]]:
        """How the core gets it: the compressor, where residuals are, and whose."""
        if codec not in self._compressors:
            self._compressors[codec] = codec.make_compressor()
        residuals = self.residuals if codec.error_feedback and ranges else None
        if residuals is not None:
            self._owing.update(name for name, *_ in ranges)
        return self._compressors[codec], residuals, [] if residuals is None else list(ranges)

    def pay_plain(self, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """As pay, for gradients that travel as they are."""
        for gradient, owner in zip(gradients, self.ranges(parameters), strict=True):
            self.pay(gradient, [owner], None)

    def pay(self, gradients: torch.Tensor, ranges: Sequence[tuple[str, int, int]], codec: Codec | None) -> None:
        """Adds to this rank's gradients of `ranges`, which `codec` encodes, what it will not add itself: arrears, and
        where it has no error feedback, all that other codecs left.

        `gradients`: contiguous or not; their order is that of `ranges`. What is owed outside of `ranges` is lost.
        """
        keeps_own = codec is not None and codec.error_feedback
        if keeps_own and not self.residuals.has_arrears:
            return
        hops = [ARREARS_HOP] if keeps_own else [ARREARS_HOP, CONTRIBUTION_HOP, RESULT_HOP]
        owed: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for name in {name for name, *_ in ranges} & self._owing:
            for hop in hops:
                is_of_average = hop == RESULT_HOP and name not in self._summed
                factor = self.backend.size() if is_of_average else 1
                segments = [(start, factor * values) for *_, start, values in self.residuals.take(name, hop)]
                owed.setdefault(name, []).extend(segments)
        if not any(owed.values()):
            return
        flat = gradients.contiguous().view(-1)
        offset = 0
        for name, start, numel in ranges:
            for first, values in owed.get(name, []):
                begin, end = max(start, first), min(start + numel, first + len(values))
                if begin < end:
                    flat[offset + begin - start : offset + end - start] += values[begin - first : end - first]
            offset += numel
        if flat.data_ptr() != gradients.data_ptr():
            gradients.copy_(flat.view_as(gradients))

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, as copies.

        {"residuals": [(name, hop, start, tensor)], "rank", "world_size", "summed": names of added tensors}
        """
        segments = self.residuals.segments()
        return {
            "residuals": [(name, hop, start, values.clone()) for name, hop, start, values in segments],
            "rank": self.backend.rank(),
            "world_size": self.backend.size(),
            "summed": sorted(self._summed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave on the same rank, also under another codec.

        In a world of another size other ranks own other ranges, so what this rank owed the average goes uncompressed
        into its next gradients. What ranks that are gone owed is lost, and new ranks, which load nothing, owe nothing.
        Warns of another rank's, and of names that the model does not have: these stay owed until a tensor has them.
        Raises ValueError for something else than `state_dict` gives, and for residuals that are not finite; the state
        is then as it was.
        """
        _check_saved(state)
        self.residuals.clear()
        self._summed = set(state.get("summed", ()))
        world_size = self.backend.size()
        former = state.get("world_size", world_size)
        self._warn_of_strangers(state, former)
        self._owing = {name for name, *_ in state["residuals"]}
        for name, hop, start, values in state["residuals"]:
            if world_size == former:
                self.residuals.load(name, hop, start, values)
            else:
                share = world_size if hop == RESULT_HOP else world_size / former  # of an average
                self.residuals.owe(name, start, values * (1 if name in self._summed else share))

    def _warn_of_strangers(self, state: Mapping[str, Any], former: int) -> None:
        rank = self.backend.rank()
        if state.get("rank", rank) != rank and former == self.backend.size():
            warnings.warn(
                f"[zeropg] State: rank {rank} loads the residuals of rank {state['rank']}; each rank must save and "
                "load its own, or what some lost is owed twice and what others lost never",
                stacklevel=3,
            )
        names = {name for name, *_ in state["residuals"]}
        unknown = sorted(names - set(self._names.values())) if self._has_model else []
        if unknown:
            more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
            warnings.warn(
                f"[zeropg] State: the model has no parameters called {', '.join(unknown[:_MOST_NAMED])}{more}, whose "
                "residuals were loaded; these stay owed until a tensor of that name is reduced. Save and load with "
                "the same model=",
                stacklevel=3,
            )
