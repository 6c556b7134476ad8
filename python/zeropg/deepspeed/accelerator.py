"""DeepSpeed's `get_accelerator`: the device that this process trains on."""

from __future__ import annotations

import torch


class Accelerator:
    """CUDA where there is a GPU, else the CPU. What a CPU has not does nothing."""

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def device_name(self, device_index: int | None = None) -> str:
        """Returns "cpu", or "cuda", or with an index "cuda:1"."""
        if not self.is_available():
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device_count(self) -> int:
        return torch.cuda.device_count() if self.is_available() else 1

    def current_device(self) -> int:
        return torch.cuda.current_device() if self.is_available() else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        if self.is_available():
            torch.cuda.set_device(device_index)

    def synchronize(self) -> None:
        if self.is_available():
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if self.is_available():
            torch.cuda.empty_cache()

    def communication_backend_name(self) -> str:
        """The backend of `init_distributed`."""
        return "zeropg"


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """Returns the one of this process."""
    return _ACCELERATOR
