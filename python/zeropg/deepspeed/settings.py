"""What an engine answers about its configuration, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from zeropg.deepspeed.accumulation import Accumulation
from zeropg.deepspeed.config import Config


class EngineSettings:
    """The part of DeepSpeedEngine that only reads the configuration, and changes its batch sizes."""

    _config: Config
    _accumulation: Accumulation
    _is_divided: bool | None

    def train_batch_size(self) -> int:
        """Samples of one update, over all ranks."""
        return self._accumulation.batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward of one rank."""
        return self._accumulation.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Backwards of one update."""
        return self._accumulation.steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns the three numbers above, in their order."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the gradient accumulation steps, so that an update has so many samples. All ranks must call.

        Raises ValueError where that is no multiple of the ranks' micro-batches, and in the middle of an update.
        """
        self._accumulation.resize(train_batch_size, is_divided=bool(self._is_divided))
        self._follow_boundary()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro-batch size; the gradient accumulation steps stay. Loaders made before keep theirs."""
        if micro_batch_size <= 0:
            raise ValueError(f"[zeropg] set_train_micro_batch_size: got {micro_batch_size}, expected at least 1")
        self._accumulation.micro_batch_size = micro_batch_size

    def zero_optimization_stage(self) -> int:
        return self._config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def gradient_clipping(self) -> float:
        """The largest norm of the gradient; 0: nothing is clipped."""
        return self._config.gradient_clipping

    def fp16_enabled(self) -> bool:
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self._config.bf16.enabled

    def loss_scale(self) -> float:
        """The configuration's: 0 where the scale is dynamic. The scale of now is `cur_scale`."""
        return self._config.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        return self.loss_scale() == 0

    def steps_per_print(self) -> int | None:
        return self._config.steps_per_print

    def dataloader_drop_last(self) -> bool:
        return self._config.dataloader_drop_last

    def managed_gradient_accumulation(self) -> bool:
        return self._config.managed_gradient_accumulation

    def optimizer_name(self) -> str | None:
        """The configuration's; None where the program made its own."""
        return self._config.optimizer.type

    def optimizer_params(self) -> dict[str, Any]:
        return self._config.optimizer.params

    def scheduler_name(self) -> str | None:
        return self._config.scheduler.type

    def scheduler_params(self) -> dict[str, Any]:
        return self._config.scheduler.params

    def _follow_boundary(self) -> None:
        raise NotImplementedError
