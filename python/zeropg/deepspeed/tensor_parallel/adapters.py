"""LoRA adapters of PEFT beside layers that are cut: the smaller matrix that meets the cut side is cut alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_BASE = ".base_layer"
# Which of an adapter's two matrices has the side of the layer that is cut.
_CUT_WITH = {"colwise": "lora_B", "rowwise": "lora_A"}


def name_without_adapters(name: str) -> str:
    """The name of a module, or of the layer that PEFT has wrapped, before PEFT came."""
    return name.removeprefix("base_model.model.").removesuffix(_BASE)


def name_around_adapters(name: str) -> str:
    """The name of a module, or of what PEFT has put around the layer that it names."""
    return name.removesuffix(_BASE)


def is_wrapped(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module is what PEFT has put around a layer."""
    return name + _BASE in modules


def with_adapters(plan: dict[str, str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Returns the plan with the adapters of its layers.

    Raises ValueError where a layer has an adapter of another kind, which would compute with the layer's whole weight.
    """
    more: dict[str, str] = {}
    for name, style in plan.items():
        if not name.endswith(_BASE):
            continue
        wrapper = name.removesuffix(_BASE)
        adapted: Any = modules[wrapper]
        if not hasattr(adapted, "lora_A") or len(getattr(adapted, "lora_magnitude_vector", ())) > 0:
            raise ValueError(
                f"{wrapper!r} is a {type(adapted).__name__} of PEFT around a layer that is cut; expected LoRA without "
                "use_dora. Say skip for it and its neighbours in tensor_parallel.partition_config"
            )
        if style in _CUT_WITH:
            more |= {f"{wrapper}.{_CUT_WITH[style]}.{adapter}": style for adapter in adapted.lora_A}
    return plan | more
