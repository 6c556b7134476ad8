"""Which backward of how many is the last before a step: micro-batches and the boundaries between them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Accumulation:
    """Counts micro-batches. A batch is `micro_batch_size` samples on each of `world_size` ranks, `steps` times."""

    micro_batch_size: int
    steps: int
    world_size: int
    is_managed: bool = True  # False: every step() is a boundary
    micro_steps: int = 0
    first: int = 0  # micro_steps when batches of this size began
    override: bool | None = None  # what the program says instead of the count

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.steps * self.world_size

    @property
    def is_boundary(self) -> bool:
        """Whether the next step() updates the model."""
        if self.override is not None:
            return self.override
        return not self.is_managed or (self.micro_steps - self.first + 1) % self.steps == 0

    def resize(self, batch_size: int, *, is_divided: bool) -> None:
        """Changes how many micro-batches make a batch. Raises ValueError where they do not come out even.

        is_divided: losses of this batch have been divided by its steps.
        """
        samples = self.micro_batch_size * self.world_size
        if not isinstance(batch_size, int) or batch_size <= 0:
            raise ValueError(f"[zeropg] set_train_batch_size: got {batch_size!r}, expected an integer above 0")
        if batch_size % samples:
            raise ValueError(
                f"[zeropg] set_train_batch_size: {batch_size} is no multiple of {samples}, the micro-batch size "
                f"{self.micro_batch_size} times {self.world_size} ranks; pass one that is"
            )
        if self.is_managed and self.override is None and (self.micro_steps - self.first) % self.steps:
            raise ValueError(
                f"[zeropg] set_train_batch_size: {(self.micro_steps - self.first) % self.steps} of {self.steps} "
                "micro-batches are accumulated already; call it after the step() of a boundary"
            )
        if is_divided and batch_size != self.batch_size:
            raise ValueError(
                f"[zeropg] set_train_batch_size: a loss of this update was divided by {self.steps} already; call it "
                "after the step() of a boundary, or after zero_grad()"
            )
        self.steps = batch_size // samples
        self.first = self.micro_steps

    def begin(self, micro_steps: int) -> None:
        """The next micro-batch is a batch's first."""
        self.micro_steps = self.first = micro_steps
