"""Runs that save half-way and go on, and runs that start from what they saved. Called on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer

BEFORE, AFTER = 2, 2  # steps
Run = tuple[list[float], dict[str, torch.Tensor]]


class Lion(torch.optim.Optimizer):
    """An optimizer of a user's own."""

    zeropg_elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    momentum = state.setdefault("momentum", torch.zeros_like(p))
                    state["steps"] = state.get("steps", 0) + 1
                    p.sub_(group["lr"] * momentum.lerp(p.grad, 0.1).sign())
                    momentum.lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "adamw": lambda model, factor: _scaled(make_optimizer(model), factor),
    "adam": lambda model, factor: torch.optim.Adam(model.parameters(), lr=factor * 1e-3, amsgrad=True),
    "sgd": lambda model, factor: torch.optim.SGD(model.parameters(), lr=factor * 1e-2, momentum=0.9),
    "nadam": lambda model, factor: torch.optim.NAdam(model.parameters(), lr=factor * 1e-3),
    "adamw in 16 bits": lambda model, factor: _compact(model, factor, 16),
    "adamw in 8 bits": lambda model, factor: _compact(model, factor, 8),
    "lion": lambda model, factor: Lion(model.parameters(), lr=factor * 1e-3),
}
COMPACT = ("adamw in 16 bits", "adamw in 8 bits")  # keep state beside float32


def _compact(model: nn.Module, factor: float, bits: int) -> torch.optim.Optimizer:
    import zeropg

    return zeropg.optim.AdamW(model.parameters(), lr=factor * 1e-3, state_bits=bits)


def _scaled(optimizer: torch.optim.Optimizer, factor: float) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return optimizer


class Trainer:
    """A model, its optimizer and its scheduler; `seed` and `factor` other than 0 and 1 are what loading must undo."""

    def __init__(
        self,
        stage: int,
        dtype: torch.dtype,
        optimizer: str = "adamw",
        *,
        seed: int = 0,
        factor: float = 1.0,
        **options: Any,
    ) -> None:
        import zeropg

        torch.set_num_threads(1)
        self.model = zeropg.fully_shard(make_model(dtype, seed=seed), stage=stage, **options)
        original = OPTIMIZERS[optimizer](self.model, factor)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(original, 20)
        self.optimizer = zeropg.shard_optimizer(original, self.model)

    def train(self, first: int, last: int) -> Run:
        import zeropg

        losses = []
        for batch in make_batches()[first:last]:
            loss = loss_of(self.model, batch.chunk(dist.get_world_size())[dist.get_rank()])
            loss.backward()
            zeropg.clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            total = loss.detach().double()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        state = zeropg.full_state_dict(self.model, rank0_only=False)
        return losses, {name: state[name] for name, _ in self.model.named_parameters()}

    def save(self, directory: Path, **options: Any) -> Any:
        import zeropg

        extra = {"scheduler": self.scheduler.state_dict()}
        rank_extra = {"rank": dist.get_rank(), "rng": torch.get_rng_state()}
        return zeropg.save_checkpoint(
            directory, self.model, self.optimizer, extra=extra, rank_extra=rank_extra, **options
        )

    def load(self, directory: Path) -> Any:
        import zeropg

        with torch.inference_mode():  # where a program that evaluates may load
            extra, rank_extra = zeropg.load_checkpoint(directory, self.model, self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])
        return rank_extra


def save_and_go_on(directory: Path, cases: list[dict[str, Any]]) -> list[Run]:
    """Trains, saves into directory/<index of the case>, trains on; the losses after saving."""
    runs = []
    for index, case in enumerate(cases):
        trainer = Trainer(**case)
        trainer.train(0, BEFORE)
        trainer.save(directory / str(index))
        runs.append(trainer.train(BEFORE, BEFORE + AFTER))
    return runs


def load_and_go_on(directory: Path, cases: list[tuple[int, dict[str, Any]]]) -> list[tuple[Run, Any]]:
    """Starts with other weights and another learning rate, loads directory/<index>, trains on."""
    runs = []
    for index, case in cases:
        trainer = Trainer(**case, seed=99, factor=7.0)
        rank_extra = trainer.load(directory / str(index))
        runs.append((trainer.train(BEFORE, BEFORE + AFTER), rank_extra))
    return runs


def relative_difference(a: Run, b: Run) -> float:
    losses = max(abs(x - y) / abs(y) for x, y in zip(a[0], b[0], strict=True))
    parameters = max(((a[1][n].double() - b[1][n].double()).norm() / b[1][n].double().norm()).item() for n in b[1])
    return max(losses, parameters)


def same_bits(a: Run, b: Run) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][name], b[1][name]) for name in b[1])
