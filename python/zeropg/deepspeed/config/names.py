"""Names of keys that DeepSpeed has given up or allows besides, and what they are called now."""

from __future__ import annotations

from typing import Any

from zeropg.deepspeed.config.error import ConfigError

_ZERO = "zero_optimization"
# Of zero_optimization; both names are good.
ALIASES = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
}
# Of zero_optimization: the block that stands for a flag.
_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_FP16_EXPORT = "stage3_gather_fp16_weights_on_model_save"
_PIN = "cpu_offload_use_pin_memory"


def with_current_names(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the configuration with today's names and without nulls, and a sentence for each name that is deprecated.

    Raises ConfigError where both the old and the new name are there.
    """
    renamed = _without_nulls(config)
    notices: list[str] = []
    _move(renamed, "bfloat16", "bf16", "", notices)
    if isinstance(renamed.get(_ZERO), bool):
        stage = int(renamed[_ZERO])
        renamed[_ZERO] = {"stage": stage}
        if "allgather_size" in renamed:
            renamed[_ZERO]["allgather_bucket_size"] = renamed.pop("allgather_size")
        notices.append(f"{_ZERO} as true or false is deprecated: use {_ZERO}.stage, here {stage}")
    zero = renamed.get(_ZERO)
    if isinstance(zero, dict):
        zero = renamed[_ZERO] = dict(zero)
        for old, new in ALIASES.items():
            _move(zero, old, new, f"{_ZERO}.")
        _move(zero, _FP16_EXPORT, ALIASES["gather_16bit_weights_on_model_save"], f"{_ZERO}.", notices)
        _replace_offload_flags(zero, notices)
    if isinstance(renamed.get("aio"), dict):
        _move(renamed["aio"], "thread_count", "intra_op_parallelism", "aio.", notices)
    if isinstance(renamed.get("tensor_parallel"), dict):
        _move(renamed["tensor_parallel"], "tensor_parallel", "tp", "tensor_parallel.")
        _move(renamed["tensor_parallel"], "kernel_inject", "replace_with_kernel_inject", "tensor_parallel.")
    return renamed, notices


def _move(block: dict[str, Any], old: str, new: str, path: str, notices: list[str] | None = None) -> None:
    if old not in block:
        return
    if new in block:
        raise ConfigError([f"{path}{old} and {path}{new} are the same key; expected one of them"])
    block[new] = block.pop(old)
    if notices is not None:
        notices.append(f"{path}{old} is deprecated: use {path}{new}")


def _replace_offload_flags(zero: dict[str, Any], notices: list[str]) -> None:
    pins = zero.pop(_PIN, None)
    if pins is not None:
        notices.append(f"{_ZERO}.{_PIN} is deprecated: use pin_memory in {_ZERO}.offload_optimizer")
    for flag, block in _OFFLOADS.items():
        is_on = zero.pop(flag, None)
        if is_on is None:
            continue
        notices.append(f'{_ZERO}.{flag} is deprecated: use {_ZERO}.{block}: {{"device": "cpu"}}')
        if is_on and block in zero:
            raise ConfigError([f"{_ZERO}.{flag} and {_ZERO}.{block} say the same; expected one of them"])
        if is_on:
            zero[block] = {"device": "cpu"} | ({} if pins is None else {"pin_memory": pins})


def _without_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """null is a key's default in DeepSpeed, and so is leaving the key out."""
    return {
        key: _without_nulls(value) if isinstance(value, dict) and key != "params" else value
        for key, value in config.items()
        if value is not None
    }
