"""The loader that `initialize(training_data=)` returns, and one that never ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler


class DeepSpeedDataLoader:
    """Batches of one micro-batch per rank; each `iter` begins a new epoch.

    A map-style dataset is shuffled and split over the ranks by a DistributedSampler, which repeats samples until all
    ranks have as many. As in DeepSpeed every epoch has the same order, unless `data_sampler.set_epoch` is called. An
    IterableDataset is read by every rank as it is.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise TypeError(
                "[zeropg] training_data is a DataLoader; expected a torch Dataset, of which the engine makes a loader "
                "with its micro-batch size"
            )
        if isinstance(dataset, IterableDataset) and world_size > 1 and rank == 0:
            warnings.warn(
                "[zeropg] training_data is an IterableDataset, of which every rank reads all samples; let it give each "
                "rank its own by dist.get_rank(), or pass a dataset with an index",
                stacklevel=2,
            )
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = data_sampler
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            drop_last=drop_last,
        )
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> DeepSpeedDataLoader:
        self._batches = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self.dataloader)
        return next(self._batches)

    def __len__(self) -> int:
        """Micro-batches per epoch and rank. Raises TypeError for an IterableDataset without a length."""
        return len(self.dataloader)


class RepeatingLoader:
    """Iterates over a loader without end: where it stops, it begins again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
