"""Configurations as users have them: the keys and values of the files that ms-swift chooses by --deepspeed zero3."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_PRECISION = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
}
_REST = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def _offload(device: str) -> dict[str, Any]:
    return {"device": device, "pin_memory": True}


def _of_stage(stage: int, device: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if stage < 3:
        zero |= {"allgather_partitions": True, "allgather_bucket_size": 2e8}
        zero |= {"reduce_scatter": True, "reduce_bucket_size": 2e8}
    if stage > 0:
        zero["offload_optimizer"] = _offload(device)
    if stage == 3:
        zero |= {
            "offload_param": _offload(device),
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return _PRECISION | {"zero_optimization": zero} | _REST


MS_SWIFT: dict[str, dict[str, Any]] = {
    "zero0": _of_stage(0, "none"),
    "zero1": _of_stage(1, "none"),
    "zero2": _of_stage(2, "none"),
    "zero2_offload": _of_stage(2, "cpu"),
    "zero3": _of_stage(3, "none"),
    "zero3_offload": _of_stage(3, "cpu"),
}


def training_arguments(**changed: Any) -> Any:
    """What the rules read of `transformers.TrainingArguments`."""
    values: dict[str, Any] = {
        "world_size": 2,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.5,
        "learning_rate": 2e-5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "fp16": False,
        "fp16_full_eval": False,
        "bf16": True,
        "bf16_full_eval": False,
        "get_warmup_steps": lambda steps: steps // 10,
    }
    return SimpleNamespace(**values | changed)
