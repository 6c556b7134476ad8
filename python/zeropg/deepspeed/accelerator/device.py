"""Which device it is, and what it can do."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch


class Device:
    """CUDA where there is a GPU, else the CPU. What a CPU has not does nothing."""

    _compile_backend = "inductor"

    def is_available(self) -> bool:
        """True: there is always a CPU. `device_name` says whether there is a GPU."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Returns "cpu", or "cuda", or with an index "cuda:1"."""
        if not torch.cuda.is_available():
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Returns the device of that name; for `with`, too."""
        return torch.device(self.device_name(self.current_device() if device_index is None else device_index))

    def device_count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 1

    def current_device(self) -> int:
        return torch.cuda.current_device() if torch.cuda.is_available() else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether a call has done its work when it returns: on the CPU."""
        return not torch.cuda.is_available()

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp64_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Returns float32, and those of 16 bits that it computes in."""
        narrow = {torch.float16: self.is_fp16_supported(), torch.bfloat16: self.is_bf16_supported()}
        return [torch.float32, *(dtype for dtype, has in narrow.items() if has)]

    def is_triton_supported(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8

    def communication_backend_name(self) -> str:
        """The backend of `init_distributed`."""
        return "zeropg"

    def export_envs(self) -> list[str]:
        """Beginnings of the variables that ranks on other hosts need, too."""
        return ["NCCL"] if torch.cuda.is_available() else []

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        """Sets the variable in an environment, such as os.environ, to these devices."""
        current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """What programs give torch.compile as its backend."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Raises ValueError for a backend that torch.compile does not know."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"[zeropg] set_compile_backend: got {backend!r}, expected one of {', '.join(known)}")
        self._compile_backend = backend
