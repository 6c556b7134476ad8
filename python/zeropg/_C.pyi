"""The C++ core of zeropg; use the names of the package zeropg."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, overload

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup, Store

class BackendOptions(Backend.Options):
    """
    Options of one process group, for `pg_options=`. Every rank must give the same values. Keyword-only:

    timeout: timedelta, deadline of every operation; init_process_group's own `timeout` wins.
    algorithms: dict, operation -> algorithm, e.g. {"all_reduce": "all_reduce_staged"}; others are planned.
    bank_bytes: int, staging memory per rank and bank, a multiple of 4096; default 1 MiB.
    mailbox_bytes: int, ring memory per ordered pair of ranks, a power of two; default 256 KiB. 1 MiB makes messages
      of many MiB a quarter faster on an AMD EPYC, and those of 4 KiB slower on an Intel Xeon.
    pool_bytes: int, most shared memory for tensors per rank (zeropg.empty); default -1: its share of all; 0: none.
    window_bytes: int, what a rank may send to a rank on another node before that one takes any; default 4 MiB.
    cma: bool, whether ranks may read large messages, and blocks of an all-to-all, in each other's memory
      (process_vm_readv), where that is faster; default True.
    network: str, "tcp", "ucx", or "automatic": UCX where every rank has it with RDMA, else TCP.
    interfaces: str, network interfaces to use between nodes: names or beginnings ("eth,ib0"), a name alone ("=eth0"),
      subnets ("10.1.0.0/16"), or all but some ("^docker,veth"); default ZEROPG_INTERFACE, else all that are up.
    ports: str, TCP ports at which ranks wait for those of other nodes ("29600-29700"); default ZEROPG_PORTS, else any.
    ucx_root: str, folder of the UCX to use; default ZEROPG_UCX_ROOT, else the system's with RDMA, else the wheel.
    secret: str, proves membership; default ZEROPG_SECRET, else the content of the file ZEROPG_SECRET_FILE, else random.
    authenticate_frames: bool, whether all bytes between nodes carry a proof that nobody changed them on the way, at the
      price of SHA-256's time; default False, or True where ZEROPG_AUTHENTICATE_FRAMES is 1. It encrypts nothing.
    connections: str, when ranks of several nodes connect: "all" while the group is made, or "on_demand": each
      pair as soon as one has something for the other, at a port that stays open; default "automatic":
      ZEROPG_CONNECTIONS, else on demand in groups of more than 128 ranks.
    host_id: str, ranks with equal ones share memory; default ZEROPG_HOST_ID, else probed.
    domain_id: str, ranks of a node with equal ones share a cache or the way to their memory; default ZEROPG_DOMAIN_ID,
      else probed from the CPUs that the process is bound to.
    rack_id: str, nodes with equal ones share a rack; default ZEROPG_RACK_ID, else none.
    topology_file: str, a JSON file with the hosts of each rack; default ZEROPG_TOPOLOGY_FILE, else none.
    measure_links: bool, whether a group on several nodes measures their links when it is made, where neither the file
      nor the default group says what they carry, in about 0.2 s, and follows them while it works; default True.
    """

    authenticate_frames: bool
    connections: str
    domain_id: str
    host_id: str
    interfaces: str
    measure_links: bool
    network: str
    ports: str
    rack_id: str
    secret: str
    topology_file: str
    ucx_root: str
    def __copy__(self) -> BackendOptions: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> BackendOptions: ...
    def __init__(self, **options: Any) -> None: ...
    @property
    def algorithms(self) -> dict[str, str]: ...
    @algorithms.setter
    def algorithms(self, value: Mapping[str, str]) -> None: ...
    @property
    def bank_bytes(self) -> int: ...
    @bank_bytes.setter
    def bank_bytes(self, value: int) -> None: ...
    @property
    def cma(self) -> bool: ...
    @cma.setter
    def cma(self, value: bool) -> None: ...
    @property
    def mailbox_bytes(self) -> int: ...
    @mailbox_bytes.setter
    def mailbox_bytes(self, value: int) -> None: ...
    @property
    def pool_bytes(self) -> int: ...
    @pool_bytes.setter
    def pool_bytes(self, value: int) -> None: ...
    @property
    def window_bytes(self) -> int: ...
    @window_bytes.setter
    def window_bytes(self, value: int) -> None: ...

class Topology:
    """Which ranks of a group share a node, and a domain of it, and which nodes share a rack; str() is a table."""
    def __repr__(self) -> str: ...
    def __str__(self) -> str: ...
    @property
    def domains(self) -> list[list[list[int]]]:
        """list[list[list[int]]]: of each node, the ranks of each domain; empty where a rank has none"""
    @property
    def host_ids(self) -> list[str]:
        """list[str]: per rank"""
    @property
    def local_rank(self) -> list[int]:
        """list[int]: per rank, index inside its node"""
    @property
    def node_rank(self) -> list[int]:
        """list[int]: per rank, index into nodes"""
    @property
    def nodes(self) -> list[list[int]]:
        """list[list[int]]: ranks of each node; the first one leads"""
    @property
    def links(self) -> list[float]:
        """list[float]: what each node's link carries either way, in GB/s; empty: not known"""
    @property
    def rack_ids(self) -> list[str]:
        """list[str]: of each rack"""
    @property
    def racks(self) -> list[list[int]]:
        """list[list[int]]: nodes of each rack; empty: none are named"""
    @property
    def rank(self) -> int: ...
    @property
    def uplinks(self) -> list[float]:
        """list[float]: likewise, of each rack's way to others; empty: none is known to be a limit"""
    @property
    def world_size(self) -> int: ...

class PartialReducer:
    """Averages of gradients that do not wait for late ranks; see zeropg.PartialReduction."""

    def __init__(
        self,
        rounds: ProcessGroup,
        messages: ProcessGroup,
        numels: Sequence[int],
        *,
        in_float64: bool,
        tolerance: float,
        max_steps_behind: int,
        patience: float,
        timeout: timedelta,
    ) -> None: ...
    def close(self) -> None: ...
    def owe(self, sums: Sequence[torch.Tensor]) -> None: ...
    def owed(self) -> list[torch.Tensor]: ...
    def post(self, gradient: torch.Tensor) -> int: ...
    def wait(self, round: int, average: torch.Tensor) -> list[bool]: ...

class ProcessGroupZero(Backend):
    def __init__(
        self, store: Store, rank: int, size: int, options: BackendOptions, make_cuda_backend: Any = None
    ) -> None: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def abort(self) -> None:
        """Ends every operation with an error, on the peers too; the group stays unusable. Never waits."""
    def all_gather_item(self, output: torch.Tensor, input: torch.Tensor, item: int) -> Any:
        """As all_gather_into_tensor, asynchronous, of CPU tensors. `item`, from 1, is compared between ranks."""
    def comm_split_count(self) -> int:
        """How often this group was split."""
    def estimates(self, operation: str, bytes: int) -> dict[str, tuple[float, bool]]:
        """By algorithm: microseconds by the model of this group's links, and whether it is chosen. For fp32."""
    def give_links(self, options: BackendOptions) -> None:
        """So that another group of the same nodes need not measure what this one knows."""
    def perform_nocolor_split(self, device: Any) -> None:
        """Does nothing: a child is made by its members alone. c10d calls it on the other ranks."""
    def recorded_operations(self) -> list[dict[str, Any]]:
        """The operations that were kept, oldest first; see flight_recorder.h for the fields."""
    def shutdown(self) -> None:
        """Gives running operations a few seconds to end, then leaves the group."""
    def start_recording(self) -> None:
        """Keeps the group's last operations from now on, for a torch without hooks. Before the first operation."""
    def stats(self) -> dict[str, dict[str, Any]]: ...
    def topology(self) -> Topology: ...
    @property
    def _timeout(self) -> timedelta: ...
    @property
    def options(self) -> BackendOptions: ...

class Rack:
    """A rack of a topology file; see topology_file.h."""
    @property
    def node_gbps(self) -> float:
        """Of each node's link, in 1e9 bytes/s; 0: the file says nothing."""
    @property
    def nodes(self) -> int: ...
    @property
    def uplink_gbps(self) -> float:
        """Likewise, of the rack's way to other racks."""

class FileLayout:
    @property
    def bytes(self) -> int: ...
    @property
    def header(self) -> builtins.bytes: ...
    @property
    def name(self) -> str: ...

class TensorPlace:
    @property
    def file(self) -> int: ...
    @property
    def offset(self) -> int: ...

class Layout:
    @property
    def files(self) -> list[FileLayout]: ...
    @property
    def places(self) -> list[TensorPlace]: ...
    @property
    def tensor_bytes(self) -> int: ...

class StagingBuffer:
    def __init__(self) -> None: ...

class FileWriter:
    @staticmethod
    def create(path: str, bytes: int) -> FileWriter: ...
    @staticmethod
    def open(path: str, bytes: int) -> FileWriter: ...
    def checksums(self) -> list[tuple[int, int, int]]:
        """[(start, stop, CRC-32C)] of what was written, in pieces inside one chunk each."""
    def close(self) -> None: ...
    def keep_checksums(self, chunk_bytes: int) -> None: ...
    def sync(self) -> None: ...
    def write(self, offset: int, flat: torch.Tensor, dtype: torch.dtype, staging: StagingBuffer) -> None: ...
    def write_bytes(self, offset: int, bytes: builtins.bytes) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def path(self) -> str: ...

class FileReader:
    """Reads ranges of a file, whole chunks with their checksums verified."""
    def __init__(self, path: str, bytes: int, chunk_bytes: int, checksums: Sequence[int]) -> None: ...
    def read(self, offset: int, dtype: torch.dtype, flat: torch.Tensor) -> None: ...
    def read_bytes(self, offset: int, bytes: int) -> builtins.bytes: ...
    @property
    def bytes(self) -> int: ...
    @property
    def path(self) -> str: ...

class StateSlot:
    """One state tensor of an optimizer; see sharding/optim/state_format.h."""
    def dtype(self, master: torch.dtype) -> torch.dtype:
        """Of an entry, beside masters of that dtype."""
    def entries(self, numel: int) -> int:
        """The entries of the first `numel` elements."""
    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """The entries that hold `values`, rounded to the nearest; beside masters in float32."""
    def unpack(self, entries: torch.Tensor, numel: int) -> torch.Tensor:
        """The elements, which are bfloat16 where they are fewer bits than the master's."""
    @property
    def is_packed(self) -> bool:
        """Whether its entries are blocks of codes, not elements."""
    @property
    def name(self) -> str: ...

class Optimizer:
    """An elementwise optimizer over flat ranges; see sharding/optim/optimizer.h."""
    def state_slots(self, hyperparameters: Mapping[str, float]) -> list[StateSlot]: ...
    def step(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        state: Sequence[torch.Tensor],
        parameter_out: torch.Tensor | None,
        *,
        range: tuple[int, int],
        hyperparameters: Mapping[str, float],
        step: int,
        gradient_factor: float = 1.0,
    ) -> None:
        """Updates elements [range[0], range[1]) of the 1-D tensors in place; parameter_out may be None."""
    @property
    def counts_steps(self) -> bool:
        """Whether those classes keep `step` beside the state slots."""
    @property
    def hyperparameters(self) -> dict[str, float]:
        """The names that step() demands, with values to measure with."""
    @property
    def name(self) -> str: ...
    @property
    def torch_classes(self) -> list[str]:
        """Names in torch.optim, or else in zeropg.optim, of the classes whose update it is.

        "zeropg.optim.AdamW" where torch has one of that name. The first is that by torch_flags and its defaults.
        """
    @property
    def torch_flags(self) -> dict[str, int]:
        """Options of those classes' param groups that must be so; flags are 0 and 1."""

class Offload:
    """What one rank of a model keeps in a tier; see sharding/offload/offload.h."""
    def describe(self) -> str: ...
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def staging_bytes(self) -> int: ...

class TieredVector:
    """A vector of numbers that lives in a tier; see sharding/offload/tiered_vector.h."""
    @overload
    def __init__(self, offload: Offload, what: str, numel: int, dtype: torch.dtype) -> None: ...
    @overload
    def __init__(self, offload: Offload, what: str, elements: int, master: torch.dtype, slot: StateSlot) -> None: ...
    def clear(self) -> None:
        """All zeros."""
    def read(self, start: int, stop: int) -> torch.Tensor:
        """A copy of elements [start, stop)."""
    def write(self, start: int, values: torch.Tensor) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def chunk_elements(self) -> int:
        """Elements that a chunk holds."""
    @property
    def numel(self) -> int: ...

class StepRun:
    """A stretch [start, stop) of a flat range whose elements take the same step."""
    def __init__(
        self,
        *,
        start: int,
        stop: int,
        optimizer: Optimizer,
        hyperparameters: Mapping[str, float],
        step: int,
        gradient_factor: float,
        slots: int,
    ) -> None: ...

class TieredFlat:
    """One flat parameter in one step; see sharding/offload/pipelined_step.h."""
    def __init__(
        self,
        *,
        tiered_master: TieredVector | None,
        master: torch.Tensor | None,
        state: Sequence[TieredVector],
        gradient: torch.Tensor,
        parameter_out: torch.Tensor | None,
        runs: Sequence[StepRun],
    ) -> None: ...

def compressors() -> list[tuple[str, str, list[tuple[str, bool | int | float]]]]:
    """[(name, help, [(parameter, default)])]: what is registered."""

class Compressor:
    """A codec of compression/registry/registry.h with its parameters."""
    def __init__(self, name: str, parameters: Mapping[str, float]) -> None: ...
    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor: ...
    def capacity_bytes(self, count: int) -> int:
        """The most that an encoding of `count` values takes."""
    def decode_add(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Adds what was encoded to `values`."""
    def encode(
        self, values: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The uint8 encoding of a float32 tensor, in `out` (capacity_bytes long) where that is given; the residual is
        added before and updated in place."""
    def typical_bytes(self, count: int) -> int: ...
    @property
    def description(self) -> str: ...

def pack_weight(values: torch.Tensor, format: str, block: int) -> torch.Tensor:
    """The uint8 bytes of a float32 matrix in "nf4", "int4" or "int8"; see compression/README.md."""

def unpack_weight(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix that pack_weight packed, in float32, bfloat16 or float16."""

class CodecMeter:
    """What the encoded calls of one model count."""
    def __init__(self) -> None: ...
    def counters(self) -> dict[str, float]:
        """Sums so far: {calls, plain_bytes, encoded_bytes, encode_seconds, decode_seconds, wire_seconds}."""

class ResidualStore:
    """Residuals of one model on one rank (error feedback)."""
    def __init__(self) -> None: ...
    def clear(self) -> None: ...
    def load(self, name: str, hop: int, start: int, values: torch.Tensor) -> None: ...
    def owe(self, name: str, start: int, values: torch.Tensor) -> None:
        """Adds values, in units of this rank's contribution, to what is still to be paid without being encoded."""
    def scale(self, factor: float) -> None: ...
    def take(self, name: str, hop: int) -> list[tuple[str, int, int, torch.Tensor]]:
        """Removes them; [(name, hop, start, tensor)]."""
    def segments(self) -> list[tuple[str, int, int, torch.Tensor]]:
        """[(name, hop, start, tensor)]: elements [start, start + len) of `name`; live, for between steps."""
    @property
    def has_arrears(self) -> bool:
        """Whether anything is to be paid without being encoded."""
    @property
    def bytes(self) -> int: ...

class FlatGroup:
    """The parameters of one unit that share a dtype, as one flat buffer."""
    def gather_master(self) -> torch.Tensor: ...
    def grad(self) -> torch.Tensor | None: ...
    def has_grad(self, parameter: torch.Tensor) -> bool: ...
    def load(self, slot: int, value: torch.Tensor, start: int = 0) -> None:
        """Sets the masters that this rank updates of elements [start, start + value.numel()) of the flattened
        parameter; between begin_step and end_load of the core."""
    def read_master(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the masters: a live view, or a copy on the CPU where they are in a tier."""
    def write_master(self, start: int, values: torch.Tensor) -> None: ...
    @property
    def is_encoded(self) -> bool: ...
    @property
    def is_trainable(self) -> bool: ...
    @property
    def local_shards(self) -> list[tuple[str, int, int, int]]: ...
    @property
    def master(self) -> torch.Tensor | None:
        """None where the masters must be read from a tier: read_master serves both."""
    @property
    def master_dtype(self) -> torch.dtype: ...
    @property
    def master_numel(self) -> int: ...
    @property
    def master_start(self) -> int: ...
    @property
    def parameter_out(self) -> torch.Tensor | None: ...
    @property
    def segments(self) -> list[tuple[torch.nn.Parameter, str, int, int]]: ...
    @property
    def sends_differences(self) -> bool: ...
    @property
    def shard_numel(self) -> int: ...
    @property
    def shard_start(self) -> int: ...
    @property
    def slots(self) -> list[tuple[list[str], torch.nn.Parameter, int, int]]: ...
    @property
    def tiered_master(self) -> TieredVector | None: ...
    @property
    def total_numel(self) -> int: ...
    @property
    def unit_name(self) -> str: ...

class RankGroups:
    """The ranks of one sharded model; with replicas, dimensions of a mesh."""
    def __init__(self, everybody: ProcessGroup, shards: ProcessGroup, replicas: ProcessGroup | None) -> None: ...
    @property
    def everybody(self) -> ProcessGroup: ...
    @property
    def shards(self) -> ProcessGroup:
        """The ranks that have one copy of the model together."""
    @property
    def replicas(self) -> ProcessGroup | None:
        """The ranks that have the same slice; None with one copy."""
    # By split, the groups that have the other parts of tensors; the first one has none.
    splits: list[list[ProcessGroup]]
    # All ranks that have some part; None where tensors are whole.
    parts: ProcessGroup | None

class UnitLimits:
    """How many elements may be whole beyond what runs, where units are gathered."""
    def __init__(
        self,
        *,
        prefetch_numel: int = 1,
        keep_numel: int = 0,
        persistent_numel: int = 0,
        max_whole_numel: int = 9223372036854775807,
    ) -> None: ...

class ShardedModule:
    """The core of a sharded model."""
    def __init__(
        self,
        units: Sequence[tuple[str, Sequence[tuple[Sequence[str], Sequence[int], torch.dtype, bool, bool, bool, int]]]],
        device: torch.device,
        order: Sequence[int],
        take: Callable[[int], Sequence[tuple[torch.Tensor, Any]]],
        groups: RankGroups,
        reduction_groups: RankGroups,
        *,
        stage: int,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        codecs: Sequence[tuple[int, Compressor | None, bool]],
        residuals: ResidualStore | None,
        weights_codec: Compressor | None,
        meter: CodecMeter | None,
        reshard_after_forward: bool,
        limits: UnitLimits = ...,
        optimizer_offload: Offload | None = None,
        store: Store | None = None,
    ) -> None: ...
    def begin_step(self, options: tuple[int, int] = (0, 0)) -> None:
        """options: two digests of what the step goes by in its param groups, rounded at other places, not 0:
        RuntimeError on every rank where both differ."""
    def changed_parameters(self) -> list[str]: ...
    def clip_grad_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> float: ...
    def set_codecs(self, codecs: Sequence[tuple[int, Compressor | None, bool]]) -> None:
        """Of gradients, from the next backward on: [(numel of the least reduction, Compressor or None for as they are,
        has_error_feedback)], ascending; the same on every rank."""
    def communication_seconds(self) -> float: ...
    def dissolve(self) -> None: ...
    def end_load(self, replaces_all: bool = False) -> bool:
        """Instead of end_step: publishes masters as they are. False, on every rank, where replicas had others.
        replaces_all: no parameter is what it was, and backwards refuse graphs of before."""
    def end_step(self, overlaps: bool = False) -> None: ...
    def join_step(self) -> None:
        """Waits for what end_step(overlaps=True) has left on its way; does not communicate."""
    def hide_full_gradients(self) -> None: ...
    def memory_report(self) -> dict[str, int]: ...
    @property
    def steps(self) -> int:
        """How many optimizer steps have ended."""
    def start_log(self) -> None: ...
    def stop_log(self) -> tuple[list[tuple[str, str, int, int, int]], list[tuple[int, dict[str, int]]]]:
        """What was done since start_log, and what memory held."""
    def post_forward(self, unit: int, outputs: Sequence[torch.Tensor]) -> None: ...
    def pre_forward(
        self, unit: int, inputs: Sequence[torch.Tensor], has_other_inputs: bool = False
    ) -> list[torch.Tensor]: ...
    def reshard_all(self) -> None: ...
    def will_accumulate(self) -> bool: ...
    def scale_gradients(self, factor: float) -> None: ...
    def scale_gradients_of(self, parameters: Sequence[torch.Tensor], factor: float) -> None: ...
    def set_synchronize(self, synchronize: bool) -> None: ...
    def reduce_accumulated(self) -> None:
        """Reduces what backwards have left that did not synchronize; collective."""
    averages_gradients: bool
    def show_full_gradients(self) -> None: ...
    def abandon_forward(self, unit: int) -> None: ...
    def settle_writes(self, operation: str) -> None: ...
    def refresh_own_masters(self) -> None: ...
    def offload_states(self, states: Sequence[str], *, moves: bool, pin_memory: bool, non_blocking: bool) -> None:
        """See sharding/module/state_offload.h; collective."""
    def reload_states(self, non_blocking: bool) -> None: ...
    def check_loaded(self, operation: str) -> None:
        """RuntimeError where something is offloaded."""
    def read_only_shard(self, shard: torch.Tensor, message: str) -> torch.Tensor: ...
    def publish_shards(self) -> None: ...
    def unshard_all(self, writable: bool) -> None: ...
    def zero_gradients(self) -> None: ...
    @property
    def fetch_is_collective(self) -> bool:
        """Whether ranks communicate to make a unit whole."""
    @property
    def fetch_name(self) -> str: ...
    @property
    def flat_groups(self) -> list[FlatGroup]: ...
    @property
    def full_depth(self) -> int: ...
    @property
    def is_compressed(self) -> bool: ...
    @property
    def optimizer_offload(self) -> Offload | None: ...
    @property
    def process_group(self) -> ProcessGroup:
        """Of every rank of the model."""
    @property
    def rank(self) -> int: ...
    @property
    def replica(self) -> int:
        """Which copy of the model this rank has a part of, among `replicas`."""
    @property
    def replicas(self) -> int: ...
    @property
    def shard(self) -> int: ...
    @property
    def shard_group(self) -> ProcessGroup:
        """Of the ranks that have one copy of the model together; this rank is `shard` of `shards` in it."""
    @property
    def shards(self) -> int: ...
    @property
    def first_item(self) -> int:
        """Errors name what ranks gather by numbers: this model's come behind this one."""
    @property
    def residuals(self) -> ResidualStore | None: ...
    @property
    def stage(self) -> int: ...
    @property
    def synchronizes(self) -> bool: ...
    @property
    def world_size(self) -> int: ...

def coding(backend: Backend) -> dict[str, float]:
    """What the encoded calls of a group without a CodecMeter have counted, as its counters()."""

def crc32c(bytes: builtins.bytes) -> int: ...
def compressed_all_reduce(
    backend: Backend,
    tensor: torch.Tensor,
    codec: Compressor,
    residuals: ResidualStore | None,
    ranges: Sequence[tuple[str, int, int]],
    op: Any,
    async_op: bool,
    meter: CodecMeter | None = None,
) -> Any: ...
def compressed_reduce_scatter(
    backend: Backend,
    output: torch.Tensor,
    input: torch.Tensor,
    codec: Compressor,
    residuals: ResidualStore | None,
    ranges: Sequence[tuple[str, int, int]],
    op: Any,
    async_op: bool,
    meter: CodecMeter | None = None,
) -> Any: ...
def compressed_all_gather(
    backend: Backend, output: torch.Tensor, input: torch.Tensor, codec: Compressor, async_op: bool
) -> Any: ...
def is_sharded(tensor: torch.Tensor) -> bool: ...
def join_checksums(pieces: Sequence[tuple[int, int, int]], file_bytes: int, chunk_bytes: int) -> list[int]:
    """One checksum per chunk of a file from the pieces of all its writers."""

def listen_to_notices(listener: Callable[[str], Any] | None) -> None:
    """The function that gets each line for people that the core says, on the main thread; None: they go to stderr."""

class TierTraits:
    """What a tier is; see sharding/offload/registry.h."""
    @property
    def device(self) -> str: ...
    @property
    def has_path(self) -> bool:
        """Whether users name its directory."""
    @property
    def is_host_memory(self) -> bool:
        """Whether a model on the CPU computes there anyway."""

def tiers() -> list[TierTraits]:
    """Every tier."""

def make_offload(
    *,
    device: str,
    directory: str,
    threads: int,
    is_pinned: bool,
    buffer_bytes: int,
    rank: int,
    world_size: int,
) -> Offload: ...
def make_optimizer(name: str, isa: str | None = None) -> Optimizer: ...
def optimizer_names() -> list[str]: ...

state_block: int

def pipelined_step(offload: Offload, flats: Sequence[TieredFlat]) -> None:
    """Steps all runs of all flat parameters; blocks."""

def parse_safetensors_header(head: bytes, file_bytes: int) -> tuple[list[Any], dict[str, str], int]:
    """Parses and validates the head of an untrusted safetensors file: (tensors, metadata, data_offset)."""

def plan_layout(
    *,
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    max_file_bytes: int,
    stem: str,
    metadata: Mapping[str, str],
) -> Layout:
    """Lays tensors out in safetensors files; a pure function of its arguments."""

def shutdown_all() -> None:
    """Shuts every group of this process down; called at the interpreter's exit."""

def wires() -> dict[str, str]:
    """Name of every wire between nodes -> the package that may bring its library; empty: it needs none."""

built_with_cuda: bool

class OpTraits:
    """What sets one operation apart from the others; see collective_spec.h."""
    @property
    def has_blocks(self) -> bool:
        """Whether a tensor has a block for each rank."""
    @property
    def has_tensors(self) -> bool:
        """Whether it moves anything."""
    @property
    def name(self) -> str: ...

def collective_operations() -> list[OpTraits]:
    """Every operation that is planned."""

def collective_algorithms(operation: str) -> list[str]:
    """Names of the algorithms of an operation such as all_reduce, for one node and for several."""

def copy_bytes(destination: torch.Tensor, source: torch.Tensor, is_streaming: bool) -> None:
    """Copies a tensor's bytes, past the caches if is_streaming."""

def parse_racks(json: str) -> list[Rack]:
    """The racks of a topology file. ValueError where it contradicts itself."""

def probe_domain_id() -> str:
    """Equal for two processes of a node that are bound to CPUs with one L3 cache or NUMA node; else empty."""

def probe_host_id() -> str:
    """Equal for two processes exactly when they can share memory."""

def simulate(
    op: str,
    bytes: int,
    nodes: Sequence[Sequence[int]],
    *,
    element_bytes: int = 4,
    root: int = 0,
    algorithm: str = "",
    barrier_us: float = 2.0,
    memory_bytes_per_us: float = 20000.0,
    hop_us: float = 30.0,
    message_us: float = 27.0,
    network_bytes_per_us: float = 1250.0,
    node_bytes_per_us: Sequence[float] = (),
    racks: Sequence[Sequence[int]] = (),
    uplink_bytes_per_us: Sequence[float] = (),
) -> dict[str, Any]:
    """Time and bytes per link of one collective on the given nodes (lists of ranks).

    `bytes` is one rank's block. The nodes of a rack, indices into `nodes`, share its uplink to the others. 'algorithm',
    'time_us', 'is_simulated' (False: too large, the time is the cost formula's), 'is_chosen' (a group would choose it)
    and 'link_bytes' [from][to]. Raises ValueError for what cannot be planned.
    """

def interface_addresses(interfaces: str) -> list[tuple[str, str]]:
    """(name, address) of the interfaces that BackendOptions(interfaces=...) allows, of those up."""

def reduction_instruction_sets() -> list[str]:
    """Those that this processor runs; the last one is used."""
