"""Memory and traffic of sharded training per rank, from sizes alone. `zeropg plan` and the main job's table use these.

Memory follows what sharding/ allocates (its README has the table): tests/tools/test_plan.py holds the figures against
`memory_report()` and the proportional set size of real runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from zeropg._native import _C
from zeropg.compression.codec import Codec
from zeropg.sharding.offload import TIERS
from zeropg.tools.plan.shape import Flat, ModelShape, Unit

# What an optimizer keeps of a master's elements: one in its dtype each (None), or slots that say it themselves.
Slots = Sequence[_C.StateSlot | None]


def _fused_slots() -> dict[str, Slots]:
    """Of each fused kernel; where it keeps more with an option (SGD with momentum), as "name-option" too."""
    slots: dict[str, Slots] = {}
    for name in _C.optimizer_names():
        kernel = _C.make_optimizer(name)
        typical = kernel.hyperparameters
        most = kernel.state_slots(typical)
        without = {key: kernel.state_slots(typical | {key: 0.0}) for key in typical}
        slots[name] = min(without.values(), key=len, default=most)
        slots.update({f"{name}-{key}": most for key, fewer in without.items() if len(fewer) < len(most)})
    return slots


# State tensors that an optimizer keeps beside the master: some classes that run as they are, and fused kernels.
OPTIMIZER_SLOTS: dict[str, Slots] = {"rmsprop": [None], **_fused_slots()}

# Buckets of units that live at once: one on its way to the other ranks while the next is filled (kMaxInFlight).
_BUCKETS_AT_ONCE = 2
# Units that are whole at once: the next one is fetched when the last gradient of this one is still computed.
_UNITS_AT_ONCE = 2
_DIFFERENCES_AT_ONCE = 2  # of flat parameters: ReplicatedFetch's kMaxInFlight
_STAGING_BYTES = 2 << 20  # two banks of the default size, per group


@dataclass(frozen=True)
class Span:
    """A group of ranks, evenly over nodes."""

    ranks: int
    nodes: int

    @property
    def local_ranks(self) -> int:
        return -(-self.ranks // self.nodes)


@dataclass(frozen=True)
class Settings:
    """How a model is to be trained; the names are `fully_shard`'s.

    replicas: copies of the model, the first dimension of a mesh; ranks / replicas that follow one another share one.
    """

    stage: int = 3
    ranks: int = 1
    nodes: int = 1
    replicas: int = 1
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    optimizer: str = "adamw"
    device: str = "cpu"
    backend: str = "zeropg"
    offload_optimizer: str | None = None  # a tier, as in zeropg.Offload(device=)
    compression: Codec | None = None  # of gradients between nodes
    weights: Codec | None = None  # of weights between nodes
    no_sync: bool = False  # gradients are accumulated over several backwards without communication
    keep_numel: int = 0

    @property
    def local_ranks(self) -> int:
        """Ranks of the fullest node."""
        return self.everybody.local_ranks

    @property
    def shards(self) -> int:
        """Ranks that one copy of the model is cut among."""
        return self.ranks // self.replicas

    @property
    def everybody(self) -> Span:
        return Span(self.ranks, self.nodes)

    @property
    def of_copy(self) -> Span:
        """The ranks of one copy."""
        return Span(self.shards, -(-self.shards // self.local_ranks))

    @property
    def of_shard(self) -> Span:
        """The ranks that have the same shard, of all copies."""
        copies_of_node = max(1, self.local_ranks // self.shards)
        return Span(self.replicas, -(-self.replicas // copies_of_node))

    @property
    def sends_differences(self) -> bool:
        """Whether encoded weights travel as differences from masters that are apart: ReplicatedFetch."""
        return self.weights is not None and self.stage in (1, 2) and self.ranks > 1

    @property
    def shares_parameters(self) -> bool:
        """Whether the ranks of a copy, all on one node, hold the parameters together: SharedFetch."""
        return self.stage == 3 and self.device == "cpu" and self.of_copy.nodes == 1 and self.backend == "zeropg"

    @property
    def shares_gathered(self) -> bool:
        """Whether the ranks of a node have one copy of what they gather: GatheredBuffers."""
        several = self.of_copy.nodes > 1 and self.of_copy.local_ranks > 1
        return self.stage == 3 and self.device == "cpu" and several and self.backend == "zeropg"


@dataclass(frozen=True)
class Holding:
    """Bytes of one kind on one rank, and where: "device" (host memory for CPU tensors), "host", or a tier ("nvme").

    is_shared: a part of memory that all ranks of the node map; it is counted once, with the rank that owns it.
    """

    kind: str
    bytes: int
    tier: str = "device"
    is_shared: bool = False


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one step, to ranks of its node and to other nodes."""

    what: str
    inside_bytes: float
    between_bytes: float


def memory(shape: ModelShape, settings: Settings) -> list[Holding]:
    """What one rank holds at the peak of a step, by kind. Activations are the model's, and not in here."""
    shape = _cut(shape, settings)
    flats = [flat for unit in shape.units for flat in unit.flats]
    holdings = [
        Holding("parameters", sum(_parameter_bytes(f, settings) for f in flats), is_shared=settings.shares_parameters)
    ]
    masters, state = (sum(part) for part in zip(*(_optimizer_bytes(f, settings) for f in flats), strict=True))
    # Where the parameter is its own master, it stays for the computation, and only the state goes.
    where = _offload_tier(settings)
    holdings += [Holding("masters", masters, where), Holding("optimizer", state, where)]
    holdings += [
        Holding("gradients", sum(_gradient_bytes(f, settings) for f in flats)),
        Holding("buckets", _bucket_bytes(shape, settings)),
        Holding("gathered", _gathered_bytes(shape, settings), is_shared=settings.shares_gathered),
        Holding("autograd", _largest_gradient_bytes(flats, settings)),
        Holding("residuals", sum(_residual_bytes(f, settings) for f in flats)),
        Holding("staging", _staging_bytes(settings), is_shared=settings.device == "cpu"),
    ]
    return holdings


def bytes_per_kind(holdings: list[Holding]) -> dict[str, int]:
    """The sum over tiers, by kind."""
    sums: dict[str, int] = {}
    for holding in holdings:
        sums[holding.kind] = sums.get(holding.kind, 0) + holding.bytes
    return sums


def traffic(shape: ModelShape, settings: Settings) -> list[Traffic]:
    """What one rank sends in one step (one backward), by the algorithms that reach the lower bounds.

    Between nodes every transfer is hierarchical: in the node first, then each rank its share with the same rank of the
    other nodes. Inside a node of CPUs "sent" means written for the others in shared memory.
    """
    shape = _cut(shape, settings)
    trainable = [flat for unit in shape.units for flat in unit.flats if flat.is_trainable]
    everything = [flat for unit in shape.units for flat in unit.flats]
    gradients = sum(flat.total_numel(settings.shards) * _reduce_dtype(flat, settings).itemsize for flat in trainable)
    encoded = sum(
        _between_bytes(flat, settings.compression, _reduce_dtype(flat, settings), settings) for flat in trainable
    )
    whole, updated, root = (_weight_bytes(flats, settings) for flats in (everything, trainable, shape.units[-1].flats))
    rows = []
    if settings.stage <= 1:
        rows.append(_both_ways("gradients: all-reduce", gradients, encoded, settings.everybody))
    elif settings.replicas == 1:
        rows.append(_one_way("gradients: reduce-scatter", gradients, encoded, settings.of_copy))
    else:
        rows.append(_one_way("gradients: reduce-scatter in a copy", gradients, gradients, settings.of_copy))
        of_shard = gradients / settings.shards, encoded / settings.shards
        rows.append(_both_ways("gradients: all-reduce between copies", *of_shard, settings.of_shard))
    if settings.stage in (1, 2):
        rows.append(_one_way("parameters: all-gather after the step", *updated, settings.of_copy))
    if settings.stage == 3:
        if settings.shares_parameters:
            rows.append(Traffic("parameters: shared in the node", 0.0, 0.0))
        else:
            rows.append(_one_way("parameters: all-gather in forward", *whole, settings.of_copy))
            # The root stays whole between its forward and its backward.
            kept = _weight_bytes((flat for unit in _kept_units(shape, settings) for flat in unit.flats), settings)
            again = whole[0] - root[0] - kept[0], whole[1] - root[1] - kept[1]
            rows.append(_one_way("parameters: all-gather in backward", *again, settings.of_copy))
    return rows


def paper_bytes(stage: int, ranks: int, parameters: int, param_dtype: torch.dtype) -> dict[str, int]:
    """Bytes per rank of training `parameters` numbers with Adam, by class, as the ZeRO paper counts them.

    arXiv:1910.02054, section 3. With 16-bit parameters: 2 bytes of weight and 2 of gradient, 12 of optimizer state
    (float32 master, mean, variance). With float32: 4, 4 and 8, since the weight is its own master. What a stage shards
    is divided by the ranks. No buffers, no padding; zeropg itself keeps 16-bit parameters' gradients in float32.
    """
    width = param_dtype.itemsize
    bytes_each = {"parameters": width, "gradients": width, "optimizer": 12 if width == 2 else 2 * width}
    sharded_from_stage = {"optimizer": 1, "gradients": 2, "parameters": 3}
    return {
        name: parameters * each // (ranks if stage >= sharded_from_stage[name] else 1)
        for name, each in bytes_each.items()
    }


def with_ranks(settings: Settings, stage: int, ranks: int) -> Settings:
    """`settings` for another stage and number of ranks; never fewer ranks than nodes."""
    return replace(settings, stage=stage, ranks=ranks, nodes=min(settings.nodes, ranks))


def _offload_tier(settings: Settings) -> str:
    if settings.offload_optimizer is None:
        return "device"
    if TIERS[settings.offload_optimizer].is_host_memory:
        return "host" if settings.device == "cuda" else "device"
    return settings.offload_optimizer


def _dtype(flat: Flat, settings: Settings) -> torch.dtype:
    return settings.param_dtype if settings.param_dtype and flat.dtype.is_floating_point else flat.dtype


def _master_dtype(flat: Flat) -> torch.dtype:
    if not flat.is_trainable or not flat.dtype.is_floating_point:
        return flat.dtype
    return torch.float64 if flat.dtype == torch.float64 else torch.float32


def _reduce_dtype(flat: Flat, settings: Settings) -> torch.dtype:
    return settings.reduce_dtype or _master_dtype(flat)


def _master_numel(flat: Flat, settings: Settings) -> int:
    return flat.shard_numel(settings.shards) if settings.stage >= 1 else flat.total_numel(settings.shards)


def _parameter_bytes(flat: Flat, settings: Settings) -> int:
    numel = flat.shard_numel(settings.shards) if settings.stage == 3 else flat.total_numel(settings.shards)
    return numel * _dtype(flat, settings).itemsize


def _optimizer_bytes(flat: Flat, settings: Settings) -> tuple[int, int]:
    """(masters beside the parameters, optimizer state)."""
    numel, width = _master_numel(flat, settings), _master_dtype(flat).itemsize
    is_apart = _dtype(flat, settings) != _master_dtype(flat) or _sends_differences(flat, settings)
    masters = numel * width if is_apart else 0
    slots = OPTIMIZER_SLOTS[settings.optimizer] if flat.is_trainable else ()
    return masters, sum(_slot_bytes(slot, numel, _master_dtype(flat)) for slot in slots)


def _slot_bytes(slot: _C.StateSlot | None, numel: int, master: torch.dtype) -> int:
    return numel * master.itemsize if slot is None else slot.entries(numel) * slot.dtype(master).itemsize


def _gradient_bytes(flat: Flat, settings: Settings) -> int:
    if not flat.is_trainable:
        return 0
    numel = flat.shard_numel(settings.shards) if settings.stage >= 2 else flat.total_numel(settings.shards)
    return numel * _master_dtype(flat).itemsize


def _bucket_bytes(shape: ModelShape, settings: Settings) -> int:
    def bucket(unit: Unit) -> int:
        total = 0
        for flat in unit.flats:
            if not flat.is_trainable:
                continue
            reduce, master = _reduce_dtype(flat, settings), _master_dtype(flat)
            numel = flat.total_numel(settings.shards)
            if settings.no_sync:
                total += numel * master.itemsize
            elif settings.stage >= 2 or reduce != master:
                total += numel * reduce.itemsize
                if settings.stage >= 2 and reduce != master and settings.shards > 1:  # where the slice arrives
                    total += flat.shard_numel(settings.shards) * reduce.itemsize
        return total

    *blocks, root = (bucket(unit) for unit in shape.units)
    if settings.no_sync and settings.stage < 2:
        return 0  # they are the kept gradients
    at_once = len(blocks) if settings.no_sync else _BUCKETS_AT_ONCE
    return root + sum(sorted(blocks)[-at_once:] if at_once else [])


def _gathered_bytes(shape: ModelShape, settings: Settings) -> int:
    if settings.sends_differences:
        numels = [
            flat.total_numel(settings.shards) + flat.shard_numel(settings.shards)
            for unit in shape.units
            for flat in unit.flats
            if _sends_differences(flat, settings)
        ]
        return 4 * sum(sorted(numels)[-_DIFFERENCES_AT_ONCE:])
    if settings.stage < 3 or settings.shares_parameters:
        return 0

    def whole(unit: Unit) -> int:
        return sum(_whole_bytes(flat, settings) for flat in unit.flats)

    *blocks, root = (whole(unit) for unit in shape.units)
    kept = sum(whole(unit) for unit in _kept_units(shape, settings))
    return root + min(sum(blocks), kept + sum(sorted(blocks)[-_UNITS_AT_ONCE:]))


def _kept_units(shape: ModelShape, settings: Settings) -> list[Unit]:
    """Those that stay whole from forward to backward, by UnitBudget's rule: the last ones that fit together."""
    kept: list[Unit] = []
    room = settings.keep_numel
    for unit in reversed(shape.units[:-1]):
        numel = sum(sum(flat.numels) for flat in unit.flats)
        if numel > settings.keep_numel:  # never kept, and in nobody's place
            continue
        if numel > room:
            break
        room -= numel
        kept.append(unit)
    return kept


def _whole_bytes(flat: Flat, settings: Settings) -> int:
    """This rank's part of a gathered flat parameter. What is decoded to 16 bits is each rank's own."""
    dtype = _dtype(flat, settings)
    is_own = settings.weights is not None and flat.is_encoded and dtype != torch.float32
    sharers = settings.of_copy.local_ranks if settings.shares_gathered and not is_own else 1
    return -(-flat.total_numel(settings.shards) * dtype.itemsize // sharers)


def _largest_gradient_bytes(flats: list[Flat], settings: Settings) -> int:
    """autograd makes each gradient anew; it is copied into its bucket and freed before the next one."""
    sizes = [max(flat.numels, default=0) * _dtype(flat, settings).itemsize for flat in flats if flat.is_trainable]
    return max(sizes, default=0)


def _residual_bytes(flat: Flat, settings: Settings) -> int:
    """Error feedback in fp32 of both hops: of the node's share that this rank sends, and of the slice that it owns."""
    if not flat.is_encoded or settings.compression is None or settings.nodes == 1 or not flat.is_trainable:
        return 0
    if settings.replicas == 1 or settings.stage < 2:
        reduced, span = flat.total_numel(settings.shards), settings.everybody
    else:
        reduced, span = flat.shard_numel(settings.shards), settings.of_shard
    return (reduced // span.local_ranks + reduced // span.ranks) * 4


def _staging_bytes(settings: Settings) -> int:
    return _STAGING_BYTES if settings.backend == "zeropg" and settings.device == "cpu" and settings.ranks > 1 else 0


def _cut(shape: ModelShape, settings: Settings) -> ModelShape:
    return shape if settings.compression is None and settings.weights is None else shape.split()


def _sends_differences(flat: Flat, settings: Settings) -> bool:
    return settings.sends_differences and flat.is_encoded and flat.is_trainable


def _between_bytes(flat: Flat, codec: Codec | None, dtype: torch.dtype, settings: Settings) -> int:
    """The flat buffer as it travels between nodes."""
    numel = flat.total_numel(settings.shards)
    return codec.make_compressor().typical_bytes(numel) if codec and flat.is_encoded else numel * dtype.itemsize


def _weight_bytes(flats: Iterable[Flat], settings: Settings) -> tuple[int, int]:
    """Weights as they travel (inside nodes, between nodes). Differences are fp32 inside."""
    inside, between = 0, 0
    for flat in flats:
        dtype = torch.float32 if _sends_differences(flat, settings) else _dtype(flat, settings)
        inside += flat.total_numel(settings.shards) * dtype.itemsize
        between += _between_bytes(flat, settings.weights, dtype, settings)
    return inside, between


def _one_way(what: str, inside: float, between: float, span: Span) -> Traffic:
    """Reduce-scatter or all-gather of that many bytes; `between`: the size that counts between nodes."""
    local, nodes = span.local_ranks, span.nodes
    return Traffic(what, inside * (local - 1) / local, between / local * (nodes - 1) / nodes)


def _both_ways(what: str, inside: float, between: float, span: Span) -> Traffic:
    there = _one_way(what, inside, between, span)
    return Traffic(what, 2 * there.inside_bytes, 2 * there.between_bytes)
