"""What becomes of the block `tensor_parallel`."""

from __future__ import annotations

from typing import Any

from zeropg.deepspeed.config.keys.key import honoured, mapped, no_effect, refused, what_is_on

_OWN_GROUPS = "Groups are made from autotp_size: each so many neighbouring ranks."


def _asks_for_groups(block: Any) -> bool:
    return isinstance(block, dict) and bool(set(block) - {"tp_size", "tp_grain_size"} or block.get("tp_size", 1) != 1)


TENSOR_PARALLEL = {
    "autotp_size": mapped(
        "initialize cuts linear layers over so many neighbouring ranks, by torch's DTensors, and shards what each rank "
        "has over the others, in every stage."
    ),
    "partition_config.layer_specs": honoured("Patterns of weights' names: cut by columns, by rows, or not."),
    "partition_config.use_default_specs": honoured(
        "true: the model's own plan says what becomes of layers that no entry names."
    ),
    "partition_config.strict_mode": no_effect("A pattern that no weight matches is always an error."),
    "preset_model": no_effect("The plan is the model's own, or partition_config."),
    "dtype": no_effect("fp16 and bf16 say in which dtype the model computes."),
    "tp_overlap_comm": no_effect("Layers' reductions are torch's own."),
    "tp": refused(_OWN_GROUPS, instead="Leave it out, and set autotp_size.", refuses=_asks_for_groups),
    "injection_policy_tuple": refused(
        "It names modules of DeepSpeed's inference.", instead="Say partition_config.", refuses=what_is_on
    ),
    "keep_module_on_host": no_effect("A model is cut where it is, before it moves to a device."),
    "replace_with_kernel_inject": refused(
        "There are no kernels to replace modules by.", instead="Leave it out.", refuses=what_is_on
    ),
}
