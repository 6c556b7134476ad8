"""DeepSpeed's `accelerator`: the device that this process trains on."""

from __future__ import annotations

from typing import Any

from zeropg.deepspeed.accelerator.device import Device
from zeropg.deepspeed.accelerator.memory import Memory
from zeropg.deepspeed.accelerator.random_numbers import RandomNumbers
from zeropg.deepspeed.accelerator.streams import Streams
from zeropg.deepspeed.accelerator.tensors import Tensors

_NOTHING_TO_BUILD = "zeropg builds no operators at run time; python -m zeropg doctor says what is there"
# By name: what DeepSpeed's has and this one has not.
_UNAVAILABLE = {
    "create_op_builder": _NOTHING_TO_BUILD,
    "get_op_builder": _NOTHING_TO_BUILD,
    "op_builder_dir": _NOTHING_TO_BUILD,
    "build_extension": "use torch.utils.cpp_extension.BuildExtension",
    "register_host_memory": "use pin_memory, which makes a tensor in page-locked memory",
    "unregister_host_memory": "use pin_memory, whose memory goes with its tensor",
}


class Accelerator(Device, Memory, RandomNumbers, Streams, Tensors):
    """CUDA where there is a GPU, else the CPU, which has no streams or events."""

    def __getattr__(self, name: str) -> Any:
        instead = _UNAVAILABLE.get(name, "use torch.cuda or torch.cpu")
        raise AttributeError(f"[zeropg] get_accelerator().{name} is not available; {instead}")


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """Returns the one of this process."""
    return _ACCELERATOR


__all__ = ["Accelerator", "get_accelerator"]
