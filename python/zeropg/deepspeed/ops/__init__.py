"""DeepSpeed's `ops`: its optimizers, as those that zeropg's fused kernels step."""

from zeropg.deepspeed.ops import adagrad as adagrad
from zeropg.deepspeed.ops import adam as adam
from zeropg.deepspeed.ops import lamb as lamb
from zeropg.deepspeed.ops import lion as lion
