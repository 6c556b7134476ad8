"""`checkpoint_activations`: blocks run again in their backward, with inputs from wherever they waited."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.memory import used_bytes
from tests.sharding.ranks import BACKENDS, STAGES, equal, on_ranks, raises
from tests.small_gpt import Block, loss_of, make_batches, make_model, make_optimizer

PLACES = ("recompute", "cpu", "partition", "directory")


class Busy(nn.Module):
    """Dropout, keyword and plain arguments, several outputs, a mask, a block that runs twice, a dictionary."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 32)
            self.down = nn.Linear(32, 16)
            self.drop = nn.Dropout(0.3)
            self.runs = 0

        def forward(
            self, x: torch.Tensor, extra: dict[str, Any], *, mask: torch.Tensor, scale: float = 1.0
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            self.runs += 1
            y = self.drop(self.down(torch.relu(self.up(x * mask)))) * scale
            return x + y, {"norm": y.square().mean() + extra["before"]}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Busy.Part() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(16) % 3 > 0).to(x.dtype)
        norm = x.new_zeros(())
        for part in (*self.parts, self.parts[1]):
            x, extra = part(x, {"before": norm}, mask=mask, scale=0.5)
            norm = extra["norm"]
        return x.square().mean() + norm


def gradients(model: nn.Module, steps: int = 3) -> list[dict[str, torch.Tensor]]:
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    torch.manual_seed(5 + dist.get_rank())
    result = []
    for _ in range(steps):
        model(torch.randn(4, 16)).backward()
        with zeropg.full_gradients(model):
            result.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return result


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=BACKENDS, timeout=120)
def test_gradients_are_those_of_the_plain_model(stage: int, tmp_path: Path) -> None:
    expected = gradients(zeropg.fully_shard(Busy(), stage=stage))
    for to in PLACES:
        for is_first in (True, False):
            model = Busy()
            place = tmp_path if to == "directory" else to
            if is_first:
                zeropg.checkpoint_activations(model, to=place)
            zeropg.fully_shard(model, stage=stage)
            if not is_first:
                zeropg.checkpoint_activations(model, to=place)
            assert isinstance(model.parts[0], Busy.Part) and type(model.parts[0]).__name__ == "Part"
            found = gradients(model)
            assert model.parts[0].runs == 6 and model.parts[1].runs == 12  # each once more in every backward
            for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                assert all(equal(mine[name], theirs[name]) for name in theirs), (to, is_first, step)
            with torch.no_grad():
                model(torch.randn(4, 16))
            assert model.parts[0].runs == 7
    assert os.listdir(tmp_path) == []


def train(model: nn.Module) -> list[float]:
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    losses = []
    for batch in make_batches()[:4]:
        loss = loss_of(model, batch)  # the same on all ranks, as in tensor parallelism
        loss.backward()
        zeropg.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(3, timeout=120)
def test_ranks_of_one_tensor_keep_a_part_of_it() -> None:
    expected = train(zeropg.fully_shard(make_model()))
    for stage in STAGES:
        model = zeropg.checkpoint_activations(make_model(), to="partition", group=dist.new_group())
        assert train(zeropg.fully_shard(model, stage=stage)) == expected


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Wide(nn.Module):
    """Saves ten times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(torch.tanh(torch.sigmoid(torch.cat([x] * 4, 0).sigmoid()))).chunk(4)[0]


def saved_bytes(model: nn.Module) -> int:
    """What a graph holds from a forward to its backward."""

    x = torch.randn(1 << 16, 4, requires_grad=True)
    before = used_bytes()
    loss = model(x)
    saved = used_bytes() - before
    loss.backward()
    return saved


@on_ranks(1)
def test_only_inputs_are_kept(tmp_path: Path) -> None:
    inputs = 8 * (1 << 20)
    plain = saved_bytes(Chain())
    for to, most in (("recompute", 1.5 * inputs), (tmp_path, 0.5 * inputs)):
        assert saved_bytes(zeropg.checkpoint_activations(Chain(), to=to)) < most < plain


class Adding(nn.Module):
    """Changes what its blocks were given, as they still need it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.first = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            y = torch.sin(block(x))
            x += y
        return x.sum()


@on_ranks(2)
def test_what_cannot_be_done_is_an_error(tmp_path: Path) -> None:
    with raises(TypeError, "expected a torch.nn.Module, got list"):
        zeropg.checkpoint_activations([nn.Linear(2, 2)])  # type: ignore[arg-type]
    with raises(ValueError, "to is '/nowhere/here'", "'recompute', 'cpu', 'partition'"):
        zeropg.checkpoint_activations(make_model(), to="/nowhere/here")
    with raises(ValueError, "group is for to='partition'"):
        zeropg.checkpoint_activations(make_model(), group=dist.group.WORLD)
    with raises(ValueError, "checkpoint_activations: units contains name 'nobody'"):
        zeropg.checkpoint_activations(make_model(), units=["nobody"])
    model = zeropg.checkpoint_activations(make_model(), units=[Block])
    with raises(ValueError, "block 'blocks.0' is checkpointed already"):
        zeropg.checkpoint_activations(model)
    patched = make_model()
    patched.blocks[1].forward = patched.blocks[1].forward  # type: ignore[method-assign]
    with raises(NotImplementedError, "`forward` of block 'blocks.1' was replaced"):
        zeropg.checkpoint_activations(patched)
    for to in ("recompute", tmp_path):
        adding = zeropg.checkpoint_activations(Adding(), to=to)
        loss = adding(torch.ones(2, 3))
        if to == "recompute":
            with raises(RuntimeError, "an input of shape [2, 3] was changed in place"):
                loss.backward()
        else:  # the file has what the block saw
            plain = Adding()
            plain.load_state_dict(adding.state_dict())
            loss.backward()
            plain_x = plain.first(torch.ones(2, 3))
            for block in plain.blocks:
                plain_x = plain_x + torch.sin(block(plain_x))
            plain_x.sum().backward()
            assert equal(adding.first.weight.grad, plain.first.weight.grad)


@on_ranks(1)
def test_copies_stay_models_of_their_own(tmp_path: Path) -> None:
    for to in PLACES[:3]:
        model = zeropg.checkpoint_activations(make_model(), to=to)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.blocks[0].norm_1.weight.zero_()
        batch = make_batches(1)[0]
        assert loss_of(model, batch) == loss_of(make_model(), batch) != loss_of(other, batch)
        loss_of(other, batch).backward()
        assert model.blocks[0].norm_1.weight.grad is None
    # A graph that is kept runs its blocks once more for each backward.
    model = zeropg.checkpoint_activations(make_model(), to=tmp_path)
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    first = model.blocks[0].norm_1.weight.grad.clone()
    loss.backward()
    assert equal(model.blocks[0].norm_1.weight.grad, 2 * first)
    block = zeropg.checkpoint_activations(Busy.Part())  # one block by itself
    out, _ = block(torch.ones(2, 16, requires_grad=True), {"before": torch.zeros(())}, mask=torch.ones(16))
    out.sum().backward()
    assert block.runs == 2


@on_ranks(2)
def test_hugging_face_models_keep_their_own_way() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=6
    )
    tokens = make_batches(1)[0]
    losses = []
    for way in (None, "theirs", "ours"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        if way == "theirs":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif way == "ours":
            zeropg.checkpoint_activations(model)
        zeropg.fully_shard(model)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        with zeropg.full_gradients(model):
            losses.append((loss.item(), model.model.layers[0].mlp.up_proj.weight.grad.clone()))
    assert losses[0][0] == losses[1][0] == losses[2][0]
    assert equal(losses[0][1], losses[2][1])


class Remembering(nn.Module):
    """Leaves something behind besides its output: statistics of its batch norm, an entry in the caller's list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        seen.append(x.detach().mean())
        return x + self.layer(self.norm(x)) * len(seen)


@on_ranks(2)
def test_blocks_leave_behind_what_one_run_leaves(tmp_path: Path) -> None:
    results = []
    for to in (None, *PLACES):
        torch.manual_seed(0)
        model = nn.ModuleList(Remembering() for _ in range(2))
        if to is not None:
            zeropg.checkpoint_activations(model, to=tmp_path if to == "directory" else to)
        x, seen = torch.randn(4, 16, requires_grad=True), []
        y = x
        for block in model:
            y = block(y, seen)
        y.square().sum().backward()
        buffers = [buffer.clone() for buffer in model.buffers()]
        results.append((len(seen), [x.grad, *buffers, *(p.grad for p in model.parameters())]))
    assert results[0][0] == 2
    for count, tensors in results[1:]:
        assert count == 2 and all(equal(mine, plain) for mine, plain in zip(tensors, results[0][1], strict=True))


@on_ranks(2)
def test_samples_in_another_order_are_not_the_same_activations() -> None:
    x = torch.arange(12.0).view(2, 6).requires_grad_()
    expected = 3 * x.detach().square()

    class Cube(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.pow(3)

    mine = (x.detach() if dist.get_rank() == 0 else x.detach().flip(0)).requires_grad_()
    zeropg.checkpoint_activations(Cube(), to="partition")(mine).sum().backward()
    assert equal(mine.grad, expected if dist.get_rank() == 0 else expected.flip(0))


@on_ranks(1)
def test_a_cache_that_hugging_face_fills_does_no_harm() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=6
    )
    tokens = make_batches(1)[0]
    found = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        if is_checkpointed:
            zeropg.checkpoint_activations(model)
        output = model(input_ids=tokens, labels=tokens)  # use_cache is on unless somebody turns it off
        output.loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(equal(mine, plain) for mine, plain in zip(*found, strict=True))
    assert output.past_key_values.get_seq_length() == 0  # as with Hugging Face's own
    with torch.no_grad():
        prefix = model(input_ids=tokens).past_key_values
    assert prefix.get_seq_length() == tokens.shape[1]
    with raises(NotImplementedError, "a cache that holds keys and values already"):
        model(input_ids=tokens, past_key_values=prefix)


@on_ranks(1)
def test_norms_that_do_not_train_and_inputs_of_inference_mode() -> None:
    norm = nn.BatchNorm1d(4).eval()
    block = zeropg.checkpoint_activations(nn.Sequential(nn.Linear(4, 4), norm))
    x = torch.randn(3, 4, requires_grad=True)
    block(norm(x)).sum().backward()  # the norm is used outside of the block, too
    with torch.inference_mode():
        mask = torch.ones(3, 4)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + mask

    masked = zeropg.checkpoint_activations(Masked())
    masked(x, mask).sum().backward()
    assert masked.layer.weight.grad is not None


@on_ranks(1)
def test_a_file_serves_lengths_that_change(tmp_path: Path) -> None:
    model = zeropg.checkpoint_activations(nn.Sequential(nn.Linear(64, 64)), to=tmp_path)
    place = vars(model)["_zeropg_activations"]
    for rows in range(1, 200):
        model(torch.ones(rows, 64, requires_grad=True)).sum().backward()
    assert os.fstat(place._file.fileno()).st_size < 10 * 200 * 64 * 4
