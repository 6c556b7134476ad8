"""What becomes of the blocks for what DeepSpeed does beside sharding, and of those that it has removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeropg.deepspeed.config.keys.key import Key, no_effect, refused, what_is_on

_DATA_PARALLEL = "An engine shards over the ranks that have different data."
_MESH = "Use torch's own parallelism over zeropg's groups (context_parallel), without an engine."
_REMOVED = "DeepSpeed has removed it."


def _is_enabled(block: Any) -> bool:
    return isinstance(block, Mapping) and bool(block.get("enabled"))


def _compiles(block: Any) -> bool:
    """Whether a block asks for DeepCompile, or as files for older versions do for torch.compile."""
    if not isinstance(block, Mapping):
        return False
    is_old = "backend" in block and not block.get("disable") and block.get("enabled") is not False
    return bool(block.get("deepcompile") or block.get("enabled") or is_old)


def _is_many(size: Any) -> bool:
    return bool(size > 1)


def _removed(instead: str) -> Key:
    return refused(_REMOVED, instead=instead, refuses=what_is_on)


ELSEWHERE = {
    "compile": refused(
        "A configuration compiles nothing.",
        instead="Call engine.compile(), or compile the blocks of the model one by one: block.compile(). They share "
        "their code, sharded or not.",
        refuses=_compiles,
    ),
    "expert_parallel": refused(
        _DATA_PARALLEL,
        instead="Leave it out: ranks of a node may take different paths through a mixture of experts.",
        refuses=_is_enabled,
    ),
    "use_data_before_expert_parallelism": no_effect("It belongs to expert parallelism, which is refused."),
    "sequence_parallel_size": refused(_DATA_PARALLEL, instead=_MESH, refuses=_is_many),
    "pipeline": refused(
        _DATA_PARALLEL, instead="Use torch.distributed.pipelining over zeropg's groups.", refuses=what_is_on
    ),
    "hybrid_engine": refused(
        "Generation has no engine of its own.",
        instead="Call generate inside zeropg.full_parameters(model).",
        refuses=_is_enabled,
    ),
    "autotuning": refused(
        "Tuning is a command of its own.",
        instead="python -m zeropg tune SCRIPT --deepspeed_config FILE finds the fastest stage and micro-batch.",
        refuses=_is_enabled,
    ),
    "data_efficiency": refused(
        "Samples and their order are the program's.",
        instead="Use a sampler of your own.",
        refuses=_is_enabled,
    ),
    "weight_quantization": refused(
        "Weights are not quantized for you.",
        instead="Quantize frozen weights before initialize: 8-bit integers are sharded as they are.",
        refuses=what_is_on,
    ),
}

REMOVED = {
    "amp": _removed("Use bf16 or fp16."),
    "compression_training": _removed("Quantize or prune with a library for that."),
    "curriculum_learning": _removed("Use a sampler of your own."),
    "eigenvalue": _removed("Leave it out."),
    "elasticity": _removed("Checkpoints load at any number of ranks: start again with as many as there are."),
    "graph_harvesting": _removed("Use torch.compile for the blocks of the model."),
    "nebula": _removed("Use zeropg.save_checkpoint(async_save=True), which writes in the background."),
    "progressive_layer_drop": _removed("Drop layers in the model's forward: every stage bears that."),
    "quantize_training": _removed("Leave it out."),
    "sparse_attention": _removed("Use torch.nn.attention.flex_attention."),
}
