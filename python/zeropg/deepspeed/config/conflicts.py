"""What keys cannot be together, or need each other: a sentence for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from zeropg.deepspeed.config.error import ConfigError
from zeropg.deepspeed.config.model import Config
from zeropg.deepspeed.config.optimizers import find_optimizer, find_scheduler, missing, wants_states_in_16_bits
from zeropg.deepspeed.config.translate import dtype_of, param_dtype
from zeropg.optim.kernels import FUSED
from zeropg.optim.momentum_optimizer import MomentumOptimizer

_COMPUTE_WITH_LAYERS = {"lamb", "onebitadam", "onebitlamb", "zerooneadam"}


def conflicts(config: Config, unfilled: Collection[str] = ()) -> list[str]:
    """Returns a sentence for each conflict: "key is value, but ...; expected ...". `unfilled` are keys yet to come."""
    found = [sentence for rule in _RULES for sentence in rule(config)]
    try:
        of = {"optimizer.params": find_optimizer(config), "scheduler.params": find_scheduler(config)}
    except ConfigError as error:
        return found + list(error.problems)
    needed = [f"{block}.{name}" for block, made in of.items() for name in missing(made)]
    return found + [f"{key} is missing; its class needs it" for key in needed if key not in unfilled]


def _precision(config: Config) -> Iterator[str]:
    if config.fp16.enabled and config.bf16.enabled:
        yield "fp16.enabled and bf16.enabled are both true; expected one of them"
        return
    if config.fp16.enabled and config.torch_autocast.enabled:
        yield "fp16.enabled and torch_autocast.enabled are both true, and autocast is to bfloat16; expected one of them"
    asked = dtype_of(config.data_types.param_dtype)
    if asked is not None and (config.fp16.enabled or config.bf16.enabled) and asked != param_dtype(config):
        name = config.data_types.param_dtype
        yield f"data_types.param_dtype is {name!r}, but fp16 or bf16 says {param_dtype(config)}; leave it out"
    if config.data_types.buffer_dtype and config.data_types.keep_in_fp32_modules not in ("auto", ()):
        yield (
            "data_types.buffer_dtype casts all buffers, but data_types.keep_in_fp32_modules names some that it must "
            "not; leave buffer_dtype out: buffers stay as they are then"
        )


def _offload(config: Config) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.offload_param.device != "none" and zero.stage < 3:
        yield (
            f"zero_optimization.offload_param.device is {zero.offload_param.device!r} in stage {zero.stage}; expected "
            "stage 3, as in DeepSpeed"
        )
    if zero.offload_optimizer.device == "nvme":
        if zero.offload_optimizer.nvme_path is None:
            yield (
                "zero_optimization.offload_optimizer.device is 'nvme' without nvme_path; expected a directory on a "
                "local disk"
            )
        if zero.zero_quantized_weights and zero.stage in (1, 2):
            yield (
                "zero_optimization.zero_quantized_weights sends differences from the masters, which offload_optimizer "
                "keeps on a disk; leave one of the two out, or use stage 3"
            )


def _compression(config: Config) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.zero_quantized_weights and zero.stage == 0:
        yield "zero_optimization.zero_quantized_weights is true in stage 0, where no weights travel; expected stage 1-3"
    if zero.zero_quantized_weights and zero.mics_shard_size > 0:
        yield (
            "zero_optimization.zero_quantized_weights is true, and mics_shard_size keeps copies of the model, whose "
            "weights do not travel encoded; leave one of the two out"
        )
    if zero.zero_quantized_gradients and config.communication_data_type not in (None, "fp32"):
        yield (
            f"communication_data_type is {config.communication_data_type!r}, but zero_quantized_gradients encodes fp32 "
            "gradients; leave one of the two out"
        )


def _tensor_parallel(config: Config) -> Iterator[str]:
    if config.tensor_parallel.size == 1:
        return
    size, zero = config.tensor_parallel.size, config.zero_optimization
    if zero.mics_shard_size > 0:
        yield (
            f"tensor_parallel.autotp_size is {size}, and mics_shard_size keeps copies of the model; leave one of the "
            "two out, or use zeropg.fully_shard(mesh=) without an engine"
        )
    if zero.zero_quantized_nontrainable_weights:
        yield (
            f"tensor_parallel.autotp_size is {size}, and zero_quantized_nontrainable_weights packs weights, which are "
            "not cut; leave one of the two out"
        )
    kind = config.optimizer.type or ""
    if kind.lower() in _COMPUTE_WITH_LAYERS:
        yield (
            f"tensor_parallel.autotp_size is {size}, and optimizer.type {kind!r} computes with whole layers or sends "
            "parts of them, which are cut; use AdamW"
        )
    for number, spec in enumerate(config.tensor_parallel.partition_config.layer_specs):
        if spec.shape is not None or spec.partition_dim is not None:
            yield (
                f"tensor_parallel.partition_config.layer_specs[{number}] has shape or partition_dim, for weights that "
                "hold several; these are not cut: leave the entry out, or say skip"
            )


def _observation(config: Config) -> Iterator[str]:
    if config.comms_logger.enabled and config.zero_optimization.mics_shard_size > 0:
        yield (
            "comms_logger.enabled is true, and counts one group's operations, while mics_shard_size makes three "
            "groups; leave one of the two out, or use torch.profiler"
        )


def _update(config: Config) -> Iterator[str]:
    try:
        made = find_optimizer(config)
    except ConfigError:  # which `conflicts` says
        return
    if made is None:
        return
    zero = config.zero_optimization
    if zero.offload_optimizer.device == "nvme" and made.type not in FUSED.values():
        yield f"optimizer.type is {config.optimizer.type!r} with state on a disk; expected one of {', '.join(FUSED)}"
    if wants_states_in_16_bits(config) and made.arguments.get("state_bits") != 16:
        yield (
            f"bf16.bf16_optimizer_states is true, but optimizer.type is {config.optimizer.type!r} with state in fp32; "
            "expected Adam or AdamW, without torch_adam and fp32_optimizer_states, or to leave it out"
        )
    if issubclass(made.type, MomentumOptimizer) and (zero.zero_quantized_gradients or zero.zero_quantized_weights):
        yield (
            f"optimizer.type is {config.optimizer.type!r}, which encodes momenta itself, with zero_quantized_gradients "
            "or zero_quantized_weights; leave these out"
        )


_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _precision,
    _offload,
    _compression,
    _tensor_parallel,
    _observation,
    _update,
)
