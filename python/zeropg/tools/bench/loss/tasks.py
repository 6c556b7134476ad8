"""What is trained: a GPT on text with AdamW, and a convolutional network on digits with momentum."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from zeropg.tools.train.gpt import GPT, GPTConfig
from zeropg.tools.train.loop import loss_per_byte, make_optimizer
from zeropg.tools.train.text import IGNORED, TrainingBatches, load_text, validation_batches

_SPLIT_SEED = 0  # of training and validation images: the same for every seed


class Task(ABC):
    """One task on one rank. The batches depend on seed and step, never on the arm or the number of ranks."""

    lr: float  # 1 in the sweep
    momentum: float = 0.0  # of its optimizer, where that is SGD
    weight_decay: float = 0.0  # as SGD takes it
    clip: float | None = None  # norm of the gradient

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.seed, self.rank, self.world_size = seed, rank, world_size

    @staticmethod
    def missing() -> str:
        """Why this task cannot run here; empty where it can."""
        return ""

    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer: ...

    @abstractmethod
    def loss(self, model: Any, step: int) -> Tensor:
        """The mean loss of this rank's part of the step's batch."""

    @abstractmethod
    def sums(self, model: Any) -> Tensor:
        """(sum of losses, right answers, answers) over this rank's part of the validation data, in float64."""

    @torch.no_grad()
    def evaluate(self, model: Any) -> tuple[float, float]:
        """(validation loss, percent of right answers) over all ranks; every rank calls it."""
        model.eval()
        total = self.sums(model)
        model.train()
        dist.all_reduce(total)
        loss, right, count = total.tolist()
        return loss / count, 100 * right / count


class TextTask(Task):
    """A byte-level GPT of 0.7 million parameters on the documentation of Python, 64 tokens per rank and step."""

    lr = 1.5e-3
    clip = 1.0
    _SHAPE = GPTConfig(layers=2, width=168, heads=4, context=64)
    _BATCH = 4
    _VALIDATION_BYTES = 16 << 10

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        super().__init__(seed, rank, world_size)
        text, context = load_text(), self._SHAPE.context
        batch = world_size * -(-self._BATCH // world_size)
        self._batches = TrainingBatches(
            text.training, context=context, batch=batch, seed=seed, rank=rank, world_size=world_size
        )
        self._validation = validation_batches(
            text.validation[: self._VALIDATION_BYTES], context=context, batch=16, rank=rank, world_size=world_size
        )

    def model(self) -> nn.Module:
        return GPT(self._SHAPE)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return make_optimizer(model, lr)

    def loss(self, model: Any, step: int) -> Tensor:
        inputs, targets = self._batches.at(step)
        return loss_per_byte(model(inputs), targets)

    def sums(self, model: Any) -> Tensor:
        total = torch.zeros(3, dtype=torch.float64)
        for inputs, targets in self._validation:
            logits = model(inputs)
            counted = targets != IGNORED
            total[0] += loss_per_byte(logits, targets, reduction="sum")
            total[1] += ((logits.argmax(-1) == targets) & counted).sum()
            total[2] += counted.sum()
        return total


class DigitsTask(Task):
    """A convolutional network of 0.15 million parameters on scikit-learn's 1797 images of digits, a third unseen.

    Without the weight decay the final loss is higher, and small changes of the gradients move it by 5 % instead of 1 %.
    """

    lr = 0.05
    momentum = 0.9
    weight_decay = 5e-3
    _BATCH = 64

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        super().__init__(seed, rank, world_size)
        from sklearn.datasets import load_digits  # its wheel has the images

        images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        images, labels = images[order].float().view(-1, 1, 8, 8) / 16, labels[order].long()
        kept = len(images) // 3
        self._images, self._labels = images[kept:], labels[kept:]
        mine = slice(rank, kept, world_size)
        self._validation = (images[:kept][mine], labels[:kept][mine])

    @staticmethod
    def missing() -> str:
        return "" if importlib.util.find_spec("sklearn") else "no scikit-learn: install requirements/bench.txt"

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
        )

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def loss(self, model: Any, step: int) -> Tensor:
        each = -(-self._BATCH // self.world_size)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        batch = torch.randperm(len(self._images), generator=generator)[: each * self.world_size]
        mine = batch[self.rank * each : (self.rank + 1) * each]
        return functional.cross_entropy(model(self._images[mine]), self._labels[mine])

    def sums(self, model: Any) -> Tensor:
        images, labels = self._validation
        logits = model(images)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(-1) == labels).sum()
        return torch.tensor([loss.item(), right.item(), len(labels)], dtype=torch.float64)


TASKS: dict[str, type[Task]] = {"text": TextTask, "digits": DigitsTask}
