"""What a compressed reduction keeps between steps: what its encodings have lost, by parameter."""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from zeropg._native import _C
from zeropg.compression.auto import Watch, choose, say
from zeropg.compression.codec import Codec, check_codec
from zeropg.compression.plan import Plan, check_plan, say_what_is_not_encoded
from zeropg.rank_io.agreement import check_same, together


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


# Of residuals in units of this rank's gradient, of the average, and again of this rank's; compression/error_feedback.h.
CONTRIBUTION_HOP, RESULT_HOP, ARREARS_HOP = 0, 1, 2
_MOST_NAMED = 4  # in a warning


def add_range(sums: dict[str, torch.Tensor], name: str, start: int, values: torch.Tensor) -> None:
    """Adds to elements [start, start + len(values)) of sums[name], which grows where it is shorter."""
    known = sums.get(name, values.new_zeros(0))
    missing = max(0, start + len(values) - len(known))
    sums[name] = torch.cat([known, values.new_zeros(missing)])
    sums[name][start : start + len(values)] += values


class State:
    """What `ddp_hook` and `Fsdp2ReduceScatter` need: the codec, the group and the residuals of one model on this rank.

    codec: e.g. BlockQuant(4), a Plan whose gradients have one, or "auto": what is fastest on this link, measured now
      and again when reductions become slower or faster (then collective; rank 0 says what it chose and why).
    process_group: that of the model; default: the world.
    model: the module that was wrapped by DDP or sharded by FSDP2; its parameters' names then stand in `state_dict`, and
      a plan's `exclude` means these. Without it DDP's parameters are numbered in the order of the first buckets.

    Raises TypeError for something that is no codec, ValueError for a group of another backend.
    """

    def __init__(
        self,
        codec: Codec | Plan | Literal["auto"],
        *,
        process_group: dist.ProcessGroup | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        self._is_auto = codec == "auto"
        given = None if isinstance(codec, str) and self._is_auto else check_plan(codec, "State")
        self.backend = backend_of(process_group, "State")
        self._group = dist.distributed_c10d._get_default_group() if process_group is None else process_group
        self._is_compared = self._is_auto  # whether all ranks are known to have this plan
        self._watch: Watch | None = None
        if given is None:
            choice = choose(self.backend)
            say(self.backend, choice)
            self._watch = Watch(self.backend)
            given = choice.plan
        elif given.gradients is None:
            raise ValueError("[zeropg] State: the plan has no codec for gradients; expected Plan(gradients=...).")
        self._use(given)
        self.residuals = _C.ResidualStore() if self._is_auto or (self.codec and self.codec.error_feedback) else None
        # By identity, and kept alive: DDP rebuilds its buckets after the first step, the parameters stay.
        self._names: dict[torch.Tensor, str] = {}
        self._has_model = model is not None
        if model is not None:
            model = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
            self._names = {parameter: name for name, parameter in model.named_parameters()}
            if self.backend.rank() == 0 and self.plan is not None:
                say_what_is_not_encoded(self.plan, model.named_parameters())
        self._unnamed: dict[tuple[int, ...], weakref.ref[torch.Tensor]] = {}  # the last one of each shape
        # By name, in units of this rank's gradient: owed since another world size, so to be paid in the next step.
        self._arrears: dict[str, torch.Tensor] = {}
        self._summed: set[str] = set()  # names whose tensors were added up last time, and not averaged

    def use(self, codec: Codec) -> None:
        """Encodes with `codec` from the next call on; what earlier encodings lost stays owed."""
        if codec != self.codec:
            gradients = check_codec(codec, "State")
            self._use(Plan(gradients=gradients) if self.plan is None else replace(self.plan, gradients=gradients))
            self._is_compared = False

    def _use(self, plan: Plan | None) -> None:
        self.plan = plan
        self.codec = None if plan is None else plan.gradients
        self.compressor = None if self.codec is None else self.codec.make_compressor()

    def begin_bucket(self) -> None:
        """Before each bucket: compares the ranks' plans once; with "auto" measures again at times. Collective then.

        Raises ValueError, on every rank, where ranks have different plans: they would mix what they encode.
        """
        if not self._is_compared:
            announced = together(self._group, "ddp_hook", lambda: {"the State's plan": repr(self.plan)})
            check_same(self._group, "ddp_hook", announced)
            self._is_compared = True
        if self._watch is None or not self._watch.begin_call():
            return
        choice = choose(self.backend)
        say(self.backend, choice, was=self.codec, is_first=False)
        if choice.codec != self.codec:
            self._owe_all()  # in units of this rank's gradients, whatever comes
            self._use(choice.plan)

    def end_bucket(self, seconds: float, numel: int) -> None:
        """After each bucket: how long it took, from its call to its result."""
        if self._watch is not None:
            self._watch.end_call(seconds, numel)

    def _owe_all(self) -> None:
        if self.residuals is not None:
            for name, hop, start, values in self.residuals.segments():
                is_of_average = hop == RESULT_HOP and name not in self._summed
                self._owe(name, start, values * (self.backend.size() if is_of_average else 1))
            self.residuals.clear()

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

    def check_serves(self, codec: Codec, group: dist.ProcessGroup | None) -> None:
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

        What another world size left of earlier calls is added to what this rank contributes.
        """
        assert self.compressor is not None and self.codec is not None
        names = {name for name, *_ in ranges}
        self._summed = self._summed | names if op == dist.ReduceOp.SUM else self._summed - names
        if any(name in self._arrears for name, *_ in ranges):
            flat = tensor.contiguous().view(-1)
            self.pay_arrears(flat, ranges)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view_as(tensor))
        residuals = self.residuals if self.codec.error_feedback else None
        return _C.compressed_all_reduce(self.backend, tensor, self.compressor, residuals, ranges, op, async_op=async_op)

    def pay_plain(self, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """As pay_arrears, for gradients that travel as they are."""
        if self._arrears:
            for gradient, owner in zip(gradients, self.ranges(parameters), strict=True):
                self.pay_arrears(gradient.view(-1), [owner])

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
        """This rank's residuals, as copies.

        {"residuals": [(name, hop, start, tensor)], "rank", "world_size", "arrears", "summed": names of added tensors}
        """
        segments = [] if self.residuals is None else self.residuals.segments()
        return {
            "residuals": [(name, hop, start, values.clone()) for name, hop, start, values in segments],
            "rank": self.backend.rank(),
            "world_size": self.backend.size(),
            "summed": sorted(self._summed),
            "arrears": {name: values.clone() for name, values in self._arrears.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave on the same rank, also under another codec.

        In a world of another size other ranks own other ranges, so what this rank owed the average goes uncompressed
        into its next gradients. What ranks that are gone owed is lost, and new ranks, which load nothing, owe nothing.
        Warns of another rank's, and of names that the model does not have: these stay owed until a tensor has them.
        Raises ValueError for residuals that are not finite.
        """
        if self.residuals is None:
            return
        self.residuals.clear()
        self._arrears.clear()
        for name, hop, start, values in state["residuals"]:
            self.residuals.load(name, hop, start, values)
        self._summed = set(state.get("summed", ()))
        world_size = self.backend.size()
        former = state.get("world_size", world_size)
        self._warn_of_strangers(state, former)
        for name, values in state.get("arrears", {}).items():
            self._owe(name, 0, values * (1 if name in self._summed else world_size / former))
        if world_size != former:
            for name, hop, start, values in self.residuals.segments():
                share = world_size if hop == RESULT_HOP else world_size / former  # of an average
                self._owe(name, start, values * (1 if name in self._summed else share))
            self.residuals.clear()

    def _warn_of_strangers(self, state: Mapping[str, Any], former: int) -> None:
        rank = self.backend.rank()
        if state.get("rank", rank) != rank and former == self.backend.size():
            warnings.warn(
                f"[zeropg] State: rank {rank} loads the residuals of rank {state['rank']}; each rank must save and "
                "load its own, or what some lost is owed twice and what others lost never",
                stacklevel=3,
            )
        names = {name for name, *_ in state["residuals"]} | set(state.get("arrears", {}))
        unknown = sorted(names - set(self._names.values())) if self._has_model else []
        if unknown:
            more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
            warnings.warn(
                f"[zeropg] State: the model has no parameters called {', '.join(unknown[:_MOST_NAMED])}{more}, whose "
                "residuals were loaded; these stay owed until a tensor of that name is reduced. Save and load with "
                "the same model=",
                stacklevel=3,
            )

    def _owe(self, name: str, start: int, values: torch.Tensor) -> None:
        _C.ResidualStore().load(name, 0, start, values)  # refuses what is not finite
        add_range(self._arrears, name, start, values)
