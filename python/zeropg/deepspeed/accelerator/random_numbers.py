"""The random numbers of the device: the GPU's, or torch's own."""

from __future__ import annotations

from types import ModuleType

import torch


class RandomNumbers:
    """Where there is no GPU, the generator is the CPU's, which torch.manual_seed seeds."""

    def random(self) -> ModuleType:
        """Returns torch.random."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seeds the current GPU's, or the CPU's."""
        if torch.cuda.is_available():
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds those of all GPUs, or the CPU's."""
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        else:
            torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed() if torch.cuda.is_available() else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Returns a state for `set_rng_state`, on the CPU."""
        if not torch.cuda.is_available():
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if torch.cuda.is_available() else torch.default_generator
