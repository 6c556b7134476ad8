"""DeepSpeed's `runtime.dataloader`: its loaders."""

from zeropg.deepspeed.dataloader import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
