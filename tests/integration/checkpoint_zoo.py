"""A model with everything that a checkpoint can meet, and what tests of checkpoints do with it on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.spawn import RankPool

MANIFEST = "zeropg_checkpoint.json"


class Counted(nn.Linear):
    """Has a state of its own beside its parameters."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count, "seen": torch.tensor([self.count])}

    def set_extra_state(self, state: Any) -> None:
        assert state["seen"].tolist() == [state["count"]]
        self.count = state["count"]


class Zoo(nn.Module):
    """Tied, frozen, ignored and integer parameters, an empty one, buffers of every kind, LoRA."""

    def __init__(self, seed: int = 0, width: int = 13) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(Counted(width, width) for _ in range(3))
        self.bn = nn.BatchNorm1d(width)
        self.table = nn.Parameter(torch.randint(100, (11,)), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 4))
        self.blocks[0].requires_grad_(False)
        self.lora = nn.ParameterList([torch.rand(width, 2), torch.rand(2, width)])
        self.scale = nn.Parameter(torch.rand(width))  # ignored by fully_shard
        self.head = nn.Linear(width, 31, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.rand(3, 3) < 0.5)
        self.register_buffer("across", torch.rand(3, 5).t())
        self.register_buffer("scratch", torch.rand(7), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.blocks[0](x) + x @ self.lora[0] @ self.lora[1]
        for block in self.blocks[1:]:
            x = x + block(x).tanh() * self.scale.to(x.dtype)
        return self.head(self.bn(x))


def make(stage: int = 3, seed: int = 0, steps: int = 2, optimizer: bool = True, **options: Any) -> tuple[Any, Any]:
    """A sharded Zoo and its AdamW after some steps."""
    import zeropg

    torch.set_num_threads(1)
    model = Zoo(seed=seed, **{key: options.pop(key) for key in ("width",) if key in options})
    zeropg.fully_shard(model, stage=stage, ignored_params=[model.scale], **options)
    if not optimizer:
        return model, None
    groups = [{"params": [p for p in model.parameters() if p.requires_grad and p is not model.scale]}]
    groups.append({"params": [model.scale], "lr": 0.3})
    sharded = zeropg.shard_optimizer(torch.optim.AdamW(groups, lr=1e-2), model)
    torch.manual_seed(seed)
    for _ in range(steps):
        model(torch.randint(31, (8,))).float().square().mean().backward()
        sharded.step()
        sharded.zero_grad()
    for block in model.blocks:
        block.count = seed + steps
    return model, sharded


def everything(model: Any, optimizer: Any = None) -> dict[str, torch.Tensor]:
    """All that a checkpoint must bring back, whole, the same on every rank."""
    import zeropg

    state = {k: v for k, v in zeropg.full_state_dict(model, rank0_only=False).items() if isinstance(v, torch.Tensor)}
    state["counts"] = torch.tensor([block.count for block in model.blocks])
    if optimizer is not None:
        full = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)
        for name, entries in full["state"].items():
            state |= {f"{name}/{key}": torch.as_tensor(value) for key, value in entries.items()}
        state["lr"] = torch.tensor([group["lr"] for group in optimizer.param_groups])
    return {key: value.clone() for key, value in state.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def save(directory: Path, seed: int = 0, stage: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    import zeropg

    model, optimizer = make(stage, seed, **options)
    zeropg.save_checkpoint(directory, model, optimizer, extra={"seed": seed}, rank_extra=[dist.get_rank()])
    return everything(model, optimizer)


def load(directory: Path, stage: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    """Loads into a model that differs in everything; checks extra too."""
    import zeropg

    model, optimizer = make(stage, 50, **options)
    extra, rank_extra = zeropg.load_checkpoint(directory, model, optimizer)
    assert extra.keys() == {"seed"} and rank_extra == [dist.get_rank()]
    return everything(model, optimizer) | {"seed": torch.tensor(extra["seed"])}


def loaded_seed(pool: RankPool, directory: Path) -> int:
    """Which save the directory holds; all of it must be of that one."""
    results = pool.run(load, directory)
    return int(results[0].pop("seed"))


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error's text; "" if there is none."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def try_save(directory: Path, seed: int = 0, **options: Any) -> str:
    return attempt(save, directory, seed, **options)


def assert_failed(errors: list[str], *words: str) -> None:
    for rank, error in enumerate(errors):
        assert f"[zeropg rank {rank}/{len(errors)}] " in error, errors
        for word in words:
            assert word in error, (word, error)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
