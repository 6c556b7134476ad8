"""`load_full_state_dict(broadcast_from_rank0=True)`: rank 0 alone has the dictionary."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.memory import used_bytes
from tests.sharding.ranks import BACKENDS, STAGES, equal, on_ranks, raises

WIDTH = 1024
BLOCKS = 16


def make_blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=BACKENDS)
def test_ranks_hold_a_piece_beside_their_shards(stage: int) -> None:
    """The dictionary has 64 MiB."""
    with torch.device("meta"):
        model = make_blocks()
    zeropg.fully_shard(model, stage=stage)
    torch.manual_seed(1)
    whole = make_blocks().state_dict() if dist.get_rank() == 0 else {}
    held: list[int] = []
    send = dist.broadcast

    def note(*args: Any, **kwargs: Any) -> Any:
        held.append(used_bytes())
        return send(*args, **kwargs)

    send(torch.zeros(WIDTH, WIDTH), 0)  # the group's own memory is there
    before = used_bytes()
    with mock.patch.object(dist, "broadcast", note):
        zeropg.load_full_state_dict(model, whole, broadcast_from_rank0=True)
    assert max(held) - before < 20 << 20, [(h - before) >> 20 for h in held]
    loaded = zeropg.full_state_dict(model)
    assert all(equal(loaded[name], value) for name, value in whole.items())


class Odd(nn.Module):
    """Tied and frozen parameters, an ignored one, buffers of no and one dimension, a transposed parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.randint(0, 99, (7,), dtype=torch.int8), requires_grad=False)
        self.ignored = nn.Parameter(torch.randn(3))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.randn(6, 2).t())
        self.register_buffer("forgotten", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.a(x))) * self.scalar + self.turned.sum()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3, backend=BACKENDS)
def test_every_kind_of_tensor_gets_its_value(stage: int) -> None:
    model = Odd(0)
    zeropg.fully_shard(model, stage=stage, ignored_params=[model.ignored], param_dtype=torch.bfloat16)
    wanted = Odd(1).state_dict()
    zeropg.load_full_state_dict(model, wanted if dist.get_rank() == 0 else {}, broadcast_from_rank0=True)
    found = zeropg.full_state_dict(model, rank0_only=False)
    assert all(equal(found[name], value) for name, value in wanted.items())
    # Older dictionaries have no count of batches; tied parameters take the value of the last name.
    older = {name: value for name, value in wanted.items() if "num_batches" not in name}
    older["b.weight"] = torch.ones(5, 5)
    result = zeropg.load_full_state_dict(model, older, broadcast_from_rank0=True)
    assert not result.missing_keys
    assert equal(zeropg.full_state_dict(model, rank0_only=False)["a.weight"], torch.ones(5, 5))
    given = {"scalar": torch.tensor(2.0), "stranger": torch.ones(2)}
    result = zeropg.load_full_state_dict(model, given, strict=False, broadcast_from_rank0=True)
    assert result.unexpected_keys == ["stranger"] and "a.weight" in result.missing_keys
    assert zeropg.full_state_dict(model, rank0_only=False)["scalar"] == 2
    with raises(TypeError, "'scalar' is a float"):
        zeropg.load_full_state_dict(model, {"scalar": 1.0}, broadcast_from_rank0=True)
    with raises(RuntimeError, 'Missing key(s) in state_dict: "frozen", "ignored"'):
        zeropg.load_full_state_dict(model, given, broadcast_from_rank0=True)


class Renaming(nn.Linear):
    """Takes what an earlier version called `kernel`."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *args)


@on_ranks(2)
def test_modules_that_load_in_a_way_of_their_own_do_so() -> None:
    for stage in STAGES:
        model = zeropg.fully_shard(nn.Sequential(Renaming(3, 3)), stage=stage)
        given = {"0.kernel": torch.full((3, 3), 2.0), "0.bias": torch.zeros(3)} if dist.get_rank() == 0 else {}
        zeropg.load_full_state_dict(model, given, broadcast_from_rank0=True)
        assert equal(zeropg.full_state_dict(model, rank0_only=False)["0.weight"], torch.full((3, 3), 2.0))
        hooked = nn.Sequential(nn.Linear(3, 3))
        hooked[0].register_load_state_dict_pre_hook(lambda module, state, prefix, *_: state[f"{prefix}weight"].mul_(2))
        zeropg.fully_shard(hooked, stage=stage)
        zeropg.load_full_state_dict(
            hooked, {"0.weight": torch.ones(3, 3), "0.bias": torch.zeros(3)}, broadcast_from_rank0=True
        )
        assert equal(zeropg.full_state_dict(hooked, rank0_only=False)["0.weight"], torch.full((3, 3), 2.0))
