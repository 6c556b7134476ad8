"""The groups of a model whose parameters are parts of distributed tensors: ranks that have the other parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zeropg._native import _C
from zeropg.backend import group_across
from zeropg.rank_io.agreement import together
from zeropg.tensor_parallel.distributed import groups_around, placements_text


@dataclass(frozen=True)
class TensorParallel:
    """Which ranks have the other parts of a sharded model's tensors.

    Attributes:
        dimensions: this rank's group of each dimension of the tensors' meshes; none without distributed parameters.
        splits: sets of these groups over which some tensor is cut; the first one is empty: tensors that are whole, also
            where several ranks have them.
        everybody: all ranks that have some part of the model: its own, in as many copies as the tensors have parts.
    """

    everybody: dist.ProcessGroup
    dimensions: list[dist.ProcessGroup] = field(default_factory=list)
    splits: list[list[dist.ProcessGroup]] = field(default_factory=lambda: [[]])

    def split_of(self, parameter: torch.Tensor) -> int:
        """Index of the parameter's split."""
        own = _split_of(parameter)
        return next(i for i, groups in enumerate(self.splits) if _same(groups, own))

    def with_same_part(self, parameter: torch.Tensor) -> list[dist.ProcessGroup]:
        """This rank's group of each dimension along which ranks have the same part of the parameter."""
        # By ranks: torch may give a DTensor an older mesh that is equal to its own, with other groups of these ranks.
        cuts = _split_of(parameter)
        return [group for group in self.dimensions if not any(_same([group], [cut]) for cut in cuts)]

    def is_first_of(self, parameter: torch.Tensor) -> bool:
        """Whether this rank is the first of those, over the dimensions, that have its part of the parameter."""
        return all(group.rank() == 0 for group in self.with_same_part(parameter))

    def together(self, operation: str, action: Callable[[], None]) -> None:
        """Runs what is collective over the ranks of one part; what it raises is raised on all ranks. Collective."""
        if self.dimensions:
            together(self.everybody, operation, action)
        else:
            action()

    def agree_on_max(self, value: torch.Tensor) -> None:
        """Gives `value` its largest value among the ranks that have the other parts; in place, collective."""
        for group in self.dimensions:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=group)


def tensor_parallel(
    named: Iterable[tuple[str, torch.Tensor]], groups: _C.RankGroups, device: torch.device
) -> TensorParallel:
    """Finds them. Collective over the ranks of both where parameters are distributed.

    Raises ValueError where a tensor is cut over the ranks that share the model.
    """
    dimensions: list[dist.ProcessGroup] = []
    splits: list[list[dist.ProcessGroup]] = [[]]
    shards = set(dist.get_process_group_ranks(groups.everybody))
    for name, parameter in named:
        for group in groups_around(parameter, only_split=False):
            if len(shards.intersection(dist.get_process_group_ranks(group))) > 1:
                raise ValueError(
                    f"[zeropg] fully_shard: {name!r} is a DTensor ({placements_text(parameter)}), and fully_shard "
                    f"would shard it over some of the same ranks ({sorted(shards)}); expected another dimension of "
                    "the mesh: mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), parallelize "
                    "over mesh['tp'], and fully_shard(model, mesh=mesh['dp'])."
                )
            if not any(_same([group], [other]) for other in dimensions):
                dimensions.append(group)
        own = _split_of(parameter)
        if not any(_same(own, other) for other in splits):
            splits.append(own)
    return TensorParallel(_everybody(groups.everybody, dimensions, device), dimensions, splits)


def _split_of(parameter: torch.Tensor) -> list[dist.ProcessGroup]:
    return groups_around(parameter, only_split=True)


def _same(one: Sequence[dist.ProcessGroup], other: Sequence[dist.ProcessGroup]) -> bool:
    ranks = [[dist.get_process_group_ranks(group) for group in groups] for groups in (one, other)]
    return ranks[0] == ranks[1]


def _everybody(
    group: dist.ProcessGroup, dimensions: Sequence[dist.ProcessGroup], device: torch.device
) -> dist.ProcessGroup:
    """The ranks of all combinations."""
    everybody = group
    for dimension in dimensions:
        if everybody.size() == 1:
            everybody = dimension
            continue
        rows: list[list[int]] = [[]] * dimension.size()
        dist.all_gather_object(rows, dist.get_process_group_ranks(everybody), group=dimension)
        ranks = sorted(rank for row in rows for rank in row)
        if len(ranks) == dist.get_world_size():
            everybody = dist.distributed_c10d._get_default_group()
        else:
            everybody = group_across(everybody, dimension, ranks, device)
    return everybody
