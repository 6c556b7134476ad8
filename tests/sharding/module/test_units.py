"""Which modules are units, and every kind of model that must train as it does in plain torch."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import STAGES, close, equal, on_ranks, raises
from tests.small_gpt import Block, loss_of, make_batches, make_model
from zeropg.sharding.units import find_blocks


def unit_names(model: nn.Module) -> dict[str, set[str]]:
    units: dict[str, set[str]] = {}
    for group in model._zeropg.flat_groups:
        units.setdefault(group.unit_name, set()).update(names[0] for names, *_ in group.slots)
    return units


@on_ranks(2)
def test_units_are_the_blocks_unless_told() -> None:
    blocks = {"blocks.0", "blocks.1", "blocks.2"}
    choices: list[tuple[Any, set[str]]] = [
        (None, blocks | {""}),
        ([], {""}),
        ([Block], blocks | {""}),
        (["blocks.1", "head"], {"blocks.1", ""}),  # the head's weight is tied to the embedding's, so the root has it
        (
            [nn.LayerNorm, "blocks.0"],
            {f"blocks.{i}.norm_{j}" for i in range(3) for j in (1, 2)} | {"blocks.0", "norm", ""},
        ),
    ]
    batch = make_batches(1)[0]
    for choice, wanted in choices:
        model = zeropg.fully_shard(make_model(), units=choice)
        assert set(unit_names(model)) == wanted, choice
        assert close(loss_of(model, batch), loss_of(make_model(), batch))
        loss_of(model, batch).backward()
    by_module = make_model()
    zeropg.fully_shard(by_module, units=[by_module.blocks[2]])
    assert set(unit_names(by_module)) == {"blocks.2", ""}
    with raises(ValueError, "units contains name 'blocks.9'", "named_modules()"):
        zeropg.fully_shard(make_model(), units=["blocks.9"])
    with raises(ValueError, "units contains a Linear"):
        zeropg.fully_shard(make_model(), units=[nn.Linear(2, 2)])
    with raises(ValueError, "class Conv2d"):
        zeropg.fully_shard(make_model(), units=[nn.Conv2d])


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stage_1 = nn.Sequential(Bottleneck(), Bottleneck())
        self.stage_2 = nn.Sequential(Bottleneck(), Bottleneck(), nn.AvgPool2d(2))
        self.lone = nn.Sequential(Bottleneck(), nn.Flatten())
        self.head = nn.Linear(4, 10)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))


def test_blocks_are_found_in_containers() -> None:
    stages = ["stage_1.0", "stage_1.1", "stage_2.0", "stage_2.1"]
    shared = Bottleneck()
    named = nn.ModuleDict({"table": nn.Embedding(4, 4), "blocks": nn.ModuleList([Bottleneck(), Bottleneck()])})
    models: list[tuple[nn.Module, list[str]]] = [
        (Stages(), stages),
        (nn.Sequential(nn.Identity(), Stages()), [f"1.{name}" for name in stages]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []),
        (nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)), ["0", "2"]),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4))), ["0", "1"]),
        (nn.Sequential(Encoder(), Encoder()), ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"]),
        (nn.ModuleList([nn.ModuleList([Bottleneck()])]), ["0.0"]),
        (nn.ModuleList([shared, nn.Linear(2, 2), shared]), ["0", "1"]),
        (nn.ModuleDict({"a": Bottleneck(), "b": Bottleneck(), "c": nn.Linear(1024, 1024)}), ["a", "b"]),
        (named, ["blocks.0", "blocks.1"]),
        (nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(2))]), nn.Linear(2, 2)]), ["1"]),
    ]
    for model, wanted in models:
        found = find_blocks(model)
        assert [name for name, _ in found] == wanted
        assert all(model.get_submodule(name) is module for name, module in found)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2048, 2048), nn.Linear(2048, 2048)


@on_ranks(2, backend="gloo")
def test_a_root_that_holds_most_is_said_once() -> None:
    def says_so(**options: Any) -> bool:
        with contextlib.redirect_stderr(io.StringIO()) as text:
            zeropg.fully_shard(Pair(), **options)
        return text.getvalue().count("the root holds 32.0 MiB of 32.0 MiB") == 1

    assert says_so() == (dist.get_rank() == 0)
    assert not says_so(stage=2)
    assert not says_so(units=["first", "second"])
    assert not says_so(units=[])


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_running_statistics_are_rank_0s_after_a_step(stage: int) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 2), nn.BatchNorm1d(2))
    model = zeropg.fully_shard(copy.deepcopy(plain), stage=stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    batches = [torch.randn(2, 8, 4) for _ in range(3)]
    for batch in batches:
        model(batch[dist.get_rank()]).sum().backward()
        optimizer.step()
        plain(batch[0])
    for name, wanted in plain.named_buffers():
        assert close(model.get_buffer(name), wanted), name


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_inner_calls_mark_units(stage: int) -> None:
    model = make_model(seed=dist.get_rank())
    for block in list(model.blocks)[:2]:
        assert zeropg.fully_shard(block, stage=stage) is block
    with raises(ValueError, "not a sharded model", "call zeropg.fully_shard(model) first"):
        zeropg.clip_grad_norm_(model, 1.0)
    parameters = dict(model.named_parameters())
    zeropg.fully_shard(model, stage=stage)
    assert set(unit_names(model)) == {"blocks.0", "blocks.1", ""}
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    batch = make_batches(1)[0]
    assert close(loss_of(model, batch), loss_of(make_model(seed=0), batch))
    loss_of(model, batch).backward()
    with raises(ValueError, "unit of a larger sharded model", "pass that model"):
        zeropg.clip_grad_norm_(model.blocks[0], 1.0)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_what_was_made_for_an_inner_model_says_that_a_larger_one_has_it(stage: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner = zeropg.fully_shard(model[0], stage=stage)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(inner.parameters(), lr=0.1), inner)
    average = zeropg.ema(inner, 0.9)
    inner(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    trained = zeropg.full_state_dict(inner, rank0_only=False)["weight"]
    zeropg.fully_shard(model, stage=stage)
    state = zeropg.full_state_dict(model, rank0_only=False)
    assert equal(state["0.weight"], trained)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain.load_state_dict(state)
    for each in (model, plain):
        each(torch.ones(2, 4)).sum().backward()
    with zeropg.full_gradients(model):
        for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert close(parameter.grad, wanted.grad, 1e-6)
    for operation, call in (("step", optimizer.step), ("ema.update", average.update)):
        with raises(RuntimeError, f"{operation}: this optimizer, or average, was made for", "make another one"):
            call()
    zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).step()


def train(model: nn.Module, step_loss: Callable[[nn.Module, int], torch.Tensor], steps: int = 3) -> list[torch.Tensor]:
    """Losses of a few steps on the same data on every rank, which must be those of the plain model."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9)
    is_sharded = isinstance(model, zeropg.FullyShardedModule)
    if is_sharded:
        optimizer = zeropg.shard_optimizer(optimizer, model)
    losses = []
    for step in range(steps):
        loss = step_loss(model, step)
        loss.backward()
        if is_sharded:
            zeropg.clip_grad_norm_(model, 1.0)
        else:
            nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def assert_trains_as_plain(
    make: Callable[[], nn.Module],
    step_loss: Callable[[nn.Module, int], torch.Tensor],
    bound: float = 1e-10,
    stages: tuple[int, ...] = STAGES,
    **options: Any,
) -> None:
    torch.manual_seed(11)
    plain = make()
    wanted = train(plain, step_loss)
    assert wanted[-1] != wanted[0]
    for stage in stages:
        torch.manual_seed(11)
        model = zeropg.fully_shard(make(), stage=stage, **options)
        found = train(model, step_loss)
        assert all(close(a, b, bound) for a, b in zip(found, wanted, strict=True)), (stage, found, wanted)
        state = zeropg.full_state_dict(model, rank0_only=False)
        for name, value in plain.state_dict().items():
            assert value.dtype == state[name].dtype and close(state[name], value, 100 * bound), (stage, name)


class Zoo(nn.Module):
    """Layers whose kernels take their weights in many ways; convolutions and RNNs want them writable."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(11, 8)
        self.conv1 = nn.Conv1d(8, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(1, 2, 3, padding=1)
        self.up = nn.ConvTranspose1d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.InstanceNorm1d(8, affine=True)])
        self.layer_norm = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.prelu = nn.PReLU(8)
        self.bilinear = nn.Bilinear(8, 8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.weight_normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.bag(tokens).unsqueeze(1)
        x = self.rms(self.layer_norm(x)).transpose(1, 2)
        x = self.up(self.conv1(x)) + self.conv2(x.unsqueeze(1)).sum(1)
        x = torch.stack([norm(x) for norm in self.norms]).sum(0)
        x = self.prelu(x).transpose(1, 2)
        x = x + self.attention(x, x, x)[0] + self.bilinear(x, x)
        x = self.weight_normed(self.encoder(x)) * self.scalar
        return x.square().mean() + self.empty.sum()


@on_ranks(2)
def test_every_kind_of_layer() -> None:
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(2))
    assert_trains_as_plain(lambda: Zoo(torch.float64), lambda model, step: model(tokens), buffer_dtype=torch.float64)
    assert_trains_as_plain(lambda: Zoo(torch.float32), lambda model, step: model(tokens), bound=1e-4)
    model = zeropg.fully_shard(Zoo(torch.float32).eval())
    with torch.no_grad():  # attention's fast paths
        assert model(tokens).isfinite()
    model = zeropg.fully_shard(Zoo(torch.float32), param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    losses = train(model, lambda model, step: model(tokens))
    assert all(loss.isfinite() for loss in losses)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(6, 6, 2, bidirectional=True), nn.GRU(12, 6), nn.RNN(6, 6)])
        self.cell = nn.LSTMCell(6, 6)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.cell(x[-1])[0].square().sum()


@on_ranks(2)
def test_recurrent_layers() -> None:
    x = torch.randn(5, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_trains_as_plain(Recurrent, lambda model, step: model(x))


class Adapted(nn.Module):
    """A LoRA-like block: a frozen matrix that the input's gradient still reads after the adapter's is done."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(9, 9).requires_grad_(False)
        self.down = nn.Linear(9, 2, bias=False)
        self.up = nn.Linear(2, 9, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class AdaptedStack(nn.Module):
    """Blocks are called twice; some are wholly frozen; one frozen parameter holds integers, one booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 9)
        self.layers = nn.ModuleList([Adapted(), nn.Linear(9, 9).requires_grad_(False), Adapted()])
        self.codes = nn.Parameter(torch.arange(9, dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(9) % 2 == 0, requires_grad=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return (x * self.codes.double() * self.mask).sum()


@on_ranks(2)
def test_frozen_and_integer_parameters_and_blocks_called_twice() -> None:
    x = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_trains_as_plain(AdaptedStack, lambda model, step: model(x))
    model = zeropg.fully_shard(AdaptedStack(), param_dtype=torch.bfloat16)
    assert model.codes.dtype == torch.int8 and model.mask.dtype == torch.bool
    model(x).backward()
    assert model.codes.grad is None and model.layers[0].base.weight.grad is None


class Detached(nn.Module):
    """Reads its weight outside of autograd, so the gradient of its input needs it after the weight's own is done."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 9).double() / 3)
        self.bias = nn.Parameter(torch.zeros(9).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.detach()) + self.bias + self.weight.sum()


@on_ranks(2)
def test_a_weight_that_is_read_through_detach() -> None:
    x = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(9, 9).double(), Detached(), Detached())

    assert_trains_as_plain(make, lambda model, step: model(x).sum(), units=[Detached])


@dataclass
class Answer:
    hidden: torch.Tensor
    loss: torch.Tensor


class Nested(nn.Module):
    """Passes tensors in and out of units inside containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([NestedBlock() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> Answer:
        state = Answer(x, x.sum())
        for layer in self.layers:
            state = layer({"state": (state, [None, 3])})
        return state


class NestedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9).double()

    def forward(self, inputs: dict[str, Any]) -> Answer:
        (state, _) = inputs["state"]
        hidden = torch.tanh(self.linear(state.hidden))
        return Answer(hidden, state.loss + hidden.sum())


@on_ranks(2)
def test_tensors_in_nested_containers_and_dataclasses() -> None:
    x = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_trains_as_plain(Nested, lambda model, step: model(x).loss)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_tied_weights_across_units(stage: int) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(4))).double()
        model[2].weight = model[0].weight
        return model

    x = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_trains_as_plain(make, lambda model, step: model(x).square().sum(), stages=(stage,), units=[nn.Linear])
    model = zeropg.fully_shard(make(), stage=stage, units=[nn.Linear])
    assert model[2].weight is model[0].weight and "0.weight" in unit_names(model)[""]


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_buffers_and_their_dtype(stage: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].register_buffer("shared", model[1].running_mean)
    model[1].running_mean.fill_(dist.get_rank() + 1.0)
    zeropg.fully_shard(model, stage=stage, buffer_dtype=torch.float64)
    assert model[1].running_mean.dtype == torch.float64 and model[1].num_batches_tracked.dtype == torch.int64
    assert equal(model[1].running_mean, torch.ones(4, dtype=torch.float64)), "rank 0's buffers win"
    assert model[2].shared is model[1].running_mean, "a buffer with two names stays one"
    wide = nn.Linear(4, 4)
    wide.register_buffer("expanded", torch.ones(1).expand(5) * 1)
    wide.register_buffer("strided", torch.arange(12.0).view(3, 4).t())
    zeropg.fully_shard(wide, stage=stage)
    assert equal(wide.strided, torch.arange(12.0).view(3, 4).t())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_ignored_parameters_are_left_alone(stage: int) -> None:
    model = make_model(torch.float64)
    ignored = [model.place.weight, model.blocks[1].up.bias]
    zeropg.fully_shard(model, stage=stage, ignored_params=ignored)
    names = {name for parameters in unit_names(model).values() for name in parameters}
    assert not names & {"place.weight", "blocks.1.up.bias"} and "blocks.1.up.weight" in names
    part = make_batches(1)[0].chunk(2)[dist.get_rank()]
    loss_of(model, part).backward()
    plain = make_model(torch.float64)
    loss_of(plain, part).backward()
    assert close(model.place.weight.grad, plain.place.weight.grad), "readable, and this rank's own"
    model.zero_grad(set_to_none=False)
    assert model.place.weight.grad.count_nonzero() == 0
    assert equal(zeropg.full_state_dict(model, rank0_only=False)["place.weight"], plain.place.weight.detach())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_models_on_meta_are_materialised(stage: int) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.LSTM(6, 6))
        model[1].bias.requires_grad_(False)
        return model

    with torch.device("meta"):
        model = make()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(4)
    zeropg.fully_shard(model, stage=stage)
    plain = make()
    torch.manual_seed(4)
    for module in plain:
        module.reset_parameters()
    state = zeropg.full_state_dict(model, rank0_only=False)
    assert all(equal(state[name], value) for name, value in plain.state_dict().items())
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    zeropg.shard_optimizer(optimizer, model)
    with torch.device("meta"):
        stubborn = make_model()
    with raises(ValueError, "positions", "SmallGPT", "reset_parameters"):
        zeropg.fully_shard(stubborn, stage=stage)


class Forgetful(nn.Linear):
    """reset_parameters leaves a buffer without values."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("scale", torch.ones(3))


@on_ranks(2)
def test_a_value_that_nobody_initialises_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Forgetful())
    with raises(ValueError, "0.scale", "reset_parameters"):
        zeropg.fully_shard(model)


def make_llama(implementation: str = "eager", **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61,
        hidden_size=36,
        intermediate_size=52,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=32,
        attn_implementation=implementation,
        use_cache=False,
        **options,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def llama_loss(model: nn.Module, step: int) -> torch.Tensor:
    tokens = make_batches(3)[step]
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@on_ranks(2, timeout=120)
def test_a_llama_of_transformers() -> None:
    for implementation in ("eager", "sdpa"):
        for checkpointing in (False, True):

            def make(implementation: str = implementation, checkpointing: bool = checkpointing) -> nn.Module:
                model = make_llama(implementation).double()
                if checkpointing:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                return model

            assert_trains_as_plain(make, llama_loss, stages=(3,) if checkpointing else (2, 3))


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@on_ranks(2, timeout=120)
def test_a_llama_on_meta_and_its_generate() -> None:
    with torch.device("meta"):
        model = make_llama()
    zeropg.fully_shard(model)
    whole = make_llama()
    whole.load_state_dict(zeropg.full_state_dict(model, rank0_only=False))
    assert close(llama_loss(model, 0), llama_loss(whole, 0), 1e-6), "non-persistent buffers have their values too"
    prompt = make_batches(1)[0][:1, :5]
    assert equal(
        model.generate(prompt, max_new_tokens=4, do_sample=False),
        whole.generate(prompt, max_new_tokens=4, do_sample=False),
    )


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@on_ranks(2, timeout=120)
def test_a_lora_of_peft() -> None:
    from peft import LoraConfig, get_peft_model

    for checkpointing in (False, True):

        def make(checkpointing: bool = checkpointing) -> nn.Module:
            model = make_llama("sdpa").double()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.enable_input_require_grads()
            adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.0))
            return adapted.double()

        assert_trains_as_plain(make, llama_loss, stages=(1, 3))


@on_ranks(2)
def test_more_ranks_than_elements_and_one_parameter() -> None:
    for stage in STAGES:
        model = zeropg.fully_shard(nn.Linear(1, 1, bias=False), stage=stage)
        model(torch.ones(1, 1)).sum().backward()
        assert zeropg.clip_grad_norm_(model, 10.0) == 1
