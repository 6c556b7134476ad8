"""The block `tensor_parallel`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from zeropg.deepspeed.config.blocks.section import Count, Section


class LayerSpec(Section):
    """An entry of `tensor_parallel.partition_config.layer_specs`: how linear layers are cut whose weights' names match.

    Patterns are regular expressions that match from the beginning of a name, as `layers.0.self_attn.o_proj.weight`.
    """

    patterns: tuple[str, ...]
    partition_type: Literal["row", "column", "skip"] = "column"
    shape: Any = None
    partition_dim: int | None = None
    model_types: tuple[str, ...] | None = None


class PartitionConfig(Section):
    """`tensor_parallel.partition_config`: the first entry whose pattern matches decides.

    use_default_specs: whether the model's own plan says what becomes of layers that no entry names.
    """

    layer_specs: tuple[LayerSpec, ...] = ()
    use_default_specs: bool = False
    strict_mode: bool = False


class TensorParallel(Section):
    """`tensor_parallel`: each linear layer is cut over `autotp_size` ranks; 0 and 1: none is."""

    autotp_size: Count = 0
    partition_config: PartitionConfig = Field(default_factory=PartitionConfig)
    preset_model: str | None = None
    dtype: str | None = None
    tp_overlap_comm: bool = False
    tp: dict[str, Any] | None = None
    injection_policy_tuple: tuple[Any, ...] | None = None
    keep_module_on_host: bool = False
    replace_with_kernel_inject: bool = False

    @property
    def size(self) -> int:
        """Ranks that share each layer; 1: none does."""
        return max(1, self.autotp_size)
