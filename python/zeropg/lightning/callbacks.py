"""`check_callbacks`: callbacks of Lightning's that cannot work on a sharded module."""

from __future__ import annotations

from collections.abc import Iterable

# Its own, by name, since versions differ in which there are. They read parameters between steps.
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
_UNFREEZING = ("BaseFinetuning",)  # which looks for a parameter in an optimizer by its values


def check_callbacks(callbacks: Iterable[object], stage: int) -> None:
    """Raises NotImplementedError, with what to use instead, where a callback reads weights that are in shards."""
    if stage < 3:
        return
    for callback in callbacks:
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        if not kinds.isdisjoint(_UNFREEZING):
            raise NotImplementedError(
                f"[zeropg] ZeroPGStrategy: {type(callback).__name__} compares the values of parameters, which are in "
                "shards in stage 3. Give the optimizer all parameters, and set requires_grad of those that wait in "
                "on_train_epoch_start of a callback of your own; or use stage 2"
            )
        if not kinds.isdisjoint(_AVERAGING):
            raise NotImplementedError(
                f"[zeropg] ZeroPGStrategy: {type(callback).__name__} reads all parameters between steps, which are "
                "in shards in stage 3. In a callback of your own make average = zeropg.ema(module) in on_train_start, "
                "call average.update() in on_train_batch_end, and evaluate inside average.average_parameters(); or "
                "use stage 2"
            )
