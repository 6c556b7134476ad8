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

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on the device; 0 for a CPU, as of the others."""
        return torch.cuda.memory_allocated(device_index) if self.is_available() else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self.is_available() else 0

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index) if self.is_available() else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self.is_available():
            torch.cuda.reset_peak_memory_stats(device_index)

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self.is_available() else True

    def is_fp16_supported(self) -> bool:
        return True

    def manual_seed(self, seed: int) -> None:
        if self.is_available():
            torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        if self.is_available():
            torch.cuda.manual_seed_all(seed)

    def communication_backend_name(self) -> str:
        """The backend of `init_distributed`."""
        return "zeropg"


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """Returns the one of this process."""
    return _ACCELERATOR
