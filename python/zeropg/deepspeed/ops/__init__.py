"""DeepSpeed's `ops`: its optimizers, as those that zeropg's fused kernels step."""

from zeropg.deepspeed.ops import adam as adam
