"""The rule of batch sizes: train_batch_size = micro batch * accumulation steps * ranks that have data of their own."""

from __future__ import annotations

from typing import NamedTuple

from zeropg.deepspeed.config.error import ConfigError


class BatchSizes(NamedTuple):
    """Samples of a step of all ranks, samples of a rank and forward, forwards of a step."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int


def data_parallel_size(world_size: int, tensor_parallel_size: int) -> int:
    """Returns how many of `world_size` ranks have data of their own. Raises ConfigError where they do not divide."""
    if world_size % tensor_parallel_size != 0:
        raise ConfigError(
            [
                f"tensor_parallel.autotp_size is {tensor_parallel_size}, and there are {world_size} ranks; expected a "
                "divisor of these"
            ]
        )
    return world_size // tensor_parallel_size


def batch_sizes(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """Returns the three numbers, of which those that are None follow from the others as in DeepSpeed.

    Raises ConfigError where they do not fit, or where neither train nor micro is given.
    """
    if train is None and micro is None:
        raise ConfigError(
            ["neither train_batch_size nor train_micro_batch_size_per_gpu is given; expected one of them, or both"]
        )
    if train is None:
        assert micro is not None
        accumulation = accumulation or 1
        return BatchSizes(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (world_size * accumulation)
    elif accumulation is None:
        accumulation = train // (world_size * micro)
    if train != micro * accumulation * world_size:
        raise ConfigError([_does_not_fit(train, micro, accumulation, world_size)])
    return BatchSizes(train, micro, accumulation)


def _does_not_fit(train: int, micro: int, accumulation: int, world_size: int) -> str:
    product = micro * accumulation * world_size
    return (
        f"train_batch_size is {train}, but train_micro_batch_size_per_gpu {micro} * gradient_accumulation_steps "
        f"{accumulation} * {world_size} ranks = {product}; expected the same: leave one of the three out, or change it"
    )
