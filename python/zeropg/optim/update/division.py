"""Which updater steps which parameters of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zeropg.optim.kernels import Group, Kernels, Storage
from zeropg.optim.momentum_optimizer import MomentumOptimizer
from zeropg.optim.update.entries import State
from zeropg.optim.update.fused import FusedUpdater
from zeropg.optim.update.layerwise import LayerwiseUpdater, rule_of
from zeropg.optim.update.momentum import MomentumUpdater
from zeropg.optim.update.offloaded import OffloadedStep, OffloadedUpdater
from zeropg.optim.update.updater import Updater
from zeropg.optim.update.views import TorchUpdater
from zeropg.optim.update.whole import WholeUpdater
from zeropg.tensor_parallel.distributed import is_distributed, placements_text


class Division:
    """The updaters of one optimizer; parameters that param groups get later have updaters of their own.

    Methods that take `groups` take the optimizer's param groups as they are now.
    """

    def __init__(
        self,
        core: Any,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: State,
        kernels: Kernels | None,
        offloaded: OffloadedStep | None,
    ):
        """optimizer: the user's own. state: what all updaters show theirs in. offloaded: the step in a tier, if any."""
        self.updaters: list[Updater] = []
        self._core = core
        self._model = model
        self._optimizer = optimizer
        self._state = state
        self._kernels = kernels
        self._rule = rule_of(optimizer)
        self._offloaded = offloaded
        self._held: set[int] = set()  # ids of the parameters that param groups had when updaters were last made
        self._frozen: list[Any] = []  # flat groups that were, then
        self._frozen_parameters: list[tuple[Any, str, torch.Tensor]] = []  # (flat group, name, parameter) in groups
        self._taken: set[int] = set()  # ids of the parameters that the updaters are for
        self._taken_whole: set[int] = set()  # of these, the ones that the layer-wise rule steps
        self._stored: dict[int, Storage] = {}  # of these, by id: how the others' updater keeps state

    def add_missing(self, groups: Sequence[Group]) -> bool:
        """Makes updaters for the parameters that a group holds and none is for; what others hold takes no state.

        Returns whether there were any. Frozen parameters get theirs when they have been unfrozen.
        """
        count = len(self.updaters)
        owners = owners_of(groups)
        self._held = set(owners)
        self._frozen = [flat for flat in self._core.flat_groups if not flat.is_trainable]
        frozen = ((flat, names[0], p) for flat in self._frozen for names, p, _, _ in flat.slots)
        self._frozen_parameters = [entry for entry in frozen if id(entry[2]) in self._held]
        if isinstance(self._optimizer, MomentumOptimizer):
            self._take_for_momenta(self._optimizer)
            return True
        self._take_whole(groups)
        held = self._held - self._taken
        sharded: set[int] = set()
        for flat in self._core.flat_groups:
            slots = {id(parameter) for _, parameter, _, _ in flat.slots}
            sharded |= slots
            for storage, own in self._by_storage(slots & held, groups).items() if flat.is_trainable else ():
                self.updaters.append(self._make(flat, own, storage))
                self._taken |= own
                self._stored.update(dict.fromkeys(own, storage))
        ignored = {name: p for name, p in self._model.named_parameters() if id(p) in held - sharded}
        if ignored:
            is_first = self._core.rank == 0
            self.updaters.append(WholeUpdater(ignored, self._state, self._optimizer, owns=is_first))
            self._taken.update(map(id, ignored.values()))
        return len(self.updaters) > count

    def holds_all(self, groups: Sequence[Group]) -> bool:
        """Whether no group has got a parameter since updaters were last made (`param_groups[0]["params"] += ...`)."""
        return owners_of(groups).keys() <= self._held

    def has_unfrozen(self) -> bool:
        """Whether parameters have been unfrozen since."""
        return any(flat.is_trainable for flat in self._frozen)

    def check_frozen(self) -> None:
        """Raises RuntimeError for a gradient that a program has put where no step would take it: torch's classes step
        by any, and what was frozen at fully_shard has no master before a forward finds it unfrozen."""
        for flat, name, parameter in self._frozen_parameters:
            if parameter.grad is not None and not flat.is_trainable:
                raise RuntimeError(
                    f"[zeropg] step: {name} has a gradient, and was frozen when fully_shard was called, so that it has "
                    "no master to step; shard it with requires_grad=True and leave out its graph by torch.no_grad, or "
                    "set its .grad to None"
                )

    def divided_otherwise(self, groups: Sequence[Group]) -> list[str]:
        """Names of the parameters that the groups' options now give to another updater."""
        group_of = {id(parameter): group for group in groups for parameter in group["params"]}
        slots = [(names, p) for flat in self._core.flat_groups for names, p, _, _ in flat.slots]
        return [
            names[0]
            for names, p in slots
            if id(p) in group_of
            and id(p) in self._taken
            and (
                self._takes_whole(p, group_of[id(p)]) != (id(p) in self._taken_whole)
                or self._stored.get(id(p), ()) != self._storage_of(p, group_of[id(p)])
            )
        ]

    def divide_anew(self, groups: Sequence[Group]) -> None:
        """Makes the updaters again, without state, where the groups divide parameters otherwise between them."""
        if self.divided_otherwise(groups):
            self.updaters, self._taken, self._taken_whole, self._stored = [], set(), set(), {}
            self.add_missing(groups)

    def places(self, groups: Sequence[Group]) -> Iterator[tuple[Updater, int, Group]]:
        """Yields (updater, index of the segment, its param group) of every segment that a group holds."""
        owners = owners_of(groups)
        for updater in self.updaters:
            for index, segment in enumerate(updater.segments):
                if id(segment.parameter) in owners:
                    yield updater, index, groups[owners[id(segment.parameter)]]

    def _takes_whole(self, parameter: torch.Tensor, group: Group) -> bool:
        """Whether a layer-wise rule steps the parameter with these options."""
        return self._rule is not None and self._rule.takes(parameter, group)

    def _take_for_momenta(self, optimizer: MomentumOptimizer) -> None:
        assert optimizer.exchange is not None  # made before
        flats = [flat for flat in self._core.flat_groups if flat.is_trainable]
        self._refuse_parts(self._held)
        self.updaters = [MomentumUpdater(flats, self._state, optimizer, optimizer.exchange, self._held)]
        self._taken = self._held

    def _take_whole(self, groups: Sequence[Group]) -> None:
        if self._rule is None:
            return
        flats = [flat for flat in self._core.flat_groups if flat.is_trainable]
        sharded = {id(parameter) for flat in flats for _, parameter, _, _ in flat.slots} - self._taken
        whole = {
            id(parameter)
            for group in groups
            for parameter in group["params"]
            if id(parameter) in sharded and self._rule.takes(parameter, group)
        }
        if whole:
            self._refuse_parts(whole)
            self.updaters.append(LayerwiseUpdater(self._core, flats, self._state, self._optimizer, self._rule, whole))
            self._taken |= whole
            self._taken_whole |= whole

    def _refuse_parts(self, ids: set[int]) -> None:
        """Raises NotImplementedError where a rank has only a part of a parameter that is stepped as a whole."""
        for flat in self._core.flat_groups:
            for names, parameter, _, _ in flat.slots:
                if id(parameter) in ids and is_distributed(parameter):
                    raise NotImplementedError(
                        f"[zeropg] shard_optimizer: {type(self._optimizer).__name__} needs {names[0]!r} whole, and it "
                        f"is a DTensor ({placements_text(parameter)}), which such optimizers do not step; use an "
                        "elementwise optimizer such as AdamW for it, in an optimizer or a param group of its own"
                    )

    def _by_storage(self, held: set[int], groups: Sequence[Group]) -> dict[Storage, set[int]]:
        """Divides parameters, given by their ids, by how the kernels of their param groups keep state."""
        divided: dict[Storage, set[int]] = {}
        for one, owner in owners_of(groups).items():  # in the same order on every rank
            if one in held:
                divided.setdefault(self._storage(groups[owner]), set()).add(one)
        return divided

    def _storage(self, group: Group) -> Storage:
        return () if self._kernels is None else self._kernels.of(group).storage

    def _storage_of(self, parameter: torch.Tensor, group: Group) -> Storage:
        return () if self._takes_whole(parameter, group) else self._storage(group)

    def _make(self, flat: Any, held: set[int], storage: Storage) -> Updater:
        if self._kernels is None:
            return TorchUpdater(flat, self._state, self._optimizer, held)
        if storage and flat.master_dtype != torch.float32:
            raise TypeError(
                f"[zeropg] shard_optimizer: unit '{flat.unit_name or '(root)'}' has masters in {flat.master_dtype}, "
                f"and {type(self._optimizer).__name__} keeps state in fewer bits beside float32 alone; use "
                "state_bits=32"
            )
        if storage and self._offloaded is None and not flat.master.is_cpu:
            raise NotImplementedError(
                f"[zeropg] shard_optimizer: state in fewer bits is kept on the CPU, and unit "
                f"'{flat.unit_name or '(root)'}' is on {flat.master.device}; use fully_shard(offload_optimizer=), or "
                "state_bits=32"
            )
        if self._offloaded is not None:
            return OffloadedUpdater(flat, self._state, self._kernels, held, self._offloaded)
        if flat.master.is_cpu and flat.master_dtype in (torch.float32, torch.float64):
            return FusedUpdater(flat, self._state, self._kernels, held)
        return TorchUpdater(flat, self._state, self._optimizer, held)


def owners_of(groups: Sequence[Group]) -> dict[int, int]:
    """Returns the index of each parameter's group, by id. Raises ValueError for a parameter in two groups."""
    owners: dict[int, int] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if owners.setdefault(id(parameter), index) != index:
                raise ValueError(
                    f"[zeropg] step: a parameter of shape {list(parameter.shape)} is in param groups "
                    f"{owners[id(parameter)]} and {index}; expected it in one"
                )
    return owners
