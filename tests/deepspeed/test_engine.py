"""The engine trains as one plain process does, counts as DeepSpeed does, and refuses what it cannot do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeropg
from tests.deepspeed.training import CLIP, STAGES, batches, configuration, make_engine, own_parts, train, train_plain
from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import loss_of, make_model, make_optimizer
from tests.spawn import RankPool

# Stage, micro-batches per step, and whether the program runs the backward by hand.
RUNS = [(stage, 1, False) for stage in STAGES] + [(stage, 4, stage % 2 == 1) for stage in STAGES]


def train_all() -> dict[tuple[int, int, bool], list[float]]:
    torch.set_num_threads(1)
    return {run: train(make_engine(run[0], run[1]), batches(), run[2]) for run in RUNS}


def test_every_stage_has_the_losses_of_one_plain_process() -> None:
    plain, norms = train_plain(batches())
    assert max(norms) > CLIP and plain[-1] < plain[0], "the reference does not clip, or does not learn"
    with RankPool(2) as pool:
        results = pool.run(train_all, timeout=180)
    for run, losses in results[0].items():
        assert losses == results[1][run]
        assert losses == pytest.approx(plain, rel=1e-5), run
    whole = [results[0][run] for run in RUNS]
    assert whole[0] == whole[1] == whole[2] == whole[3]
    # Accumulated: stages 0 and 1 add up before they reduce, the others after.
    assert whole[4] == whole[5] and whole[6] == whole[7]


@on_ranks(2)
def test_counters_and_boundaries_are_deepspeeds() -> None:
    engine = make_engine(1, gas=4)
    assert engine.get_batch_info() == (16, 2, 4) and engine.zero_optimization_stage() == 1
    parts = [part for batch in batches()[:2] for part in own_parts(batch, 4)]
    seen = []
    for part in parts[:5]:
        engine.backward(loss_of(engine, part))
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        seen.append((boundary, engine.was_step_applied(), engine.micro_steps, engine.global_steps))
    assert [row[:2] for row in seen] == [(False, False)] * 3 + [(True, True), (False, False)]
    assert [row[2:] for row in seen] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]
    assert engine.global_samples == 16 and engine.skipped_steps == 0
    # The program's own boundaries: one step() for any number of backwards.
    engine.zero_grad()
    engine.set_gradient_accumulation_boundary(False)
    with engine.no_sync():
        engine.backward(loss_of(engine, parts[0]))
        with raises(RuntimeError, "inside engine.no_sync()"):
            engine.step()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine, parts[1]))
    engine.step()
    assert engine.was_step_applied() and engine.global_steps == 2
    engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (8, 2, 2)
    with raises(ValueError, "10 is no multiple of 4", "2 ranks"):
        engine.set_train_batch_size(10)


@on_ranks(2)
def test_two_engines_share_a_loss() -> None:
    plain = make_model()
    parts = own_parts(batches()[0], 2)
    for by_hand in (False, True):
        engines = [make_engine(stage, gas=2) for stage in (1, 3)]
        for part in parts:
            loss = torch.stack([loss_of(engine, part) for engine in engines]).sum()
            if by_hand:
                loss.backward()
            else:
                engines[0].backward(loss)
            for engine in engines:
                engine.step()
        norms = [engine.get_global_grad_norm().item() for engine in engines]
        loss_of(plain, batches()[0]).backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
        assert norms == pytest.approx([expected] * 2, rel=1e-5), "each is divided by the micro-batches once"
        plain.zero_grad()


class Answers(nn.Module):
    """Outputs in containers, one of them without a graph, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {"loss": y.square().mean(), "others": [(y.sum(), x)]}


@on_ranks(2)
def test_outputs_of_any_kind_are_divided_once() -> None:
    from zeropg import deepspeed

    def loss_of_answers(answers: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = answers["loss"] + 0.1 * answers["others"][0][0] / 2
        return loss

    data = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(1))  # rank, micro-batch, row, feature
    plain = Answers()
    (sum(loss_of_answers(plain(part)) for part in data.flatten(0, 1)) / 4).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.inner.parameters()]).item()
    for stage in STAGES:
        model = Answers()
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=made, config=configuration(stage, 2) | {"train_batch_size": 8}
        )
        for part in data[dist.get_rank()]:
            loss_of_answers(engine(part)).backward()
            engine.step()
        assert engine.get_global_grad_norm().item() == pytest.approx(expected, rel=1e-5)


class Chained(nn.Module):
    """As Hugging Face's models: the loss is made from another output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Linear(4, 4)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.adapter(self.inner(x))
        return {"logits": logits, "loss": logits.square().mean()}


@on_ranks(2)
def test_a_loss_made_from_an_output_is_divided_once() -> None:
    from zeropg import deepspeed

    data = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(1))  # rank, micro-batch, row, feature

    def norm(run: Any, *, trains: str = "", penalty: float = 0.0) -> float:
        model = Chained()
        chosen = [p for name, p in model.named_parameters() if name.startswith(trains)]
        if run is None:
            total = sum(model(part)["loss"] for part in data.flatten(0, 1)) / 4
            (total + penalty * model.inner.weight.square().sum()).backward()
            return torch.nn.utils.get_total_norm([p.grad for p in chosen]).item()
        made = torch.optim.SGD(chosen, lr=0.1)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=made, config=configuration(1, 2) | {"train_batch_size": 8}
        )
        for part in data[dist.get_rank()]:
            run(engine, engine(part)["loss"] + penalty * engine.module.inner.weight.square().sum())
            engine.step()
        return engine.get_global_grad_norm().item()  # type: ignore[no-any-return]

    by_hand = lambda _, loss: loss.backward()  # noqa: E731
    assert norm(by_hand) == pytest.approx(norm(None), rel=1e-5)
    assert norm(by_hand, penalty=0.1) == pytest.approx(norm(None, penalty=0.1), rel=1e-5)
    assert norm(lambda engine, loss: engine.backward(loss)) == pytest.approx(norm(None), rel=1e-5)
    # Trainer's call: the loss, an output of the engine, is divided already.
    trainers = norm(lambda engine, loss: engine.backward(loss, scale_wrt_gas=False))
    assert trainers == pytest.approx(2 * norm(None), rel=1e-5)
    assert norm(by_hand, trains="adapter") == pytest.approx(norm(None, trains="adapter"), rel=1e-5)


@on_ranks(2)
def test_an_update_has_one_way_of_backwards_and_batches_change_between_updates() -> None:
    engine = make_engine(1, gas=2)
    part = own_parts(batches()[0], 2)[0]
    engine.backward(loss_of(engine, part))
    engine.step()
    with raises(RuntimeError, "in one of the two ways"):
        loss_of(engine, part).backward()
    with raises(ValueError, "1 of 2 micro-batches are accumulated already"):
        engine.set_train_batch_size(2 * engine.train_batch_size())
    engine.zero_grad()
    engine.backward(loss_of(engine, part))
    engine.step()
    engine.set_train_batch_size(2 * engine.train_batch_size())
    applied = []
    for _ in range(4):
        engine.backward(loss_of(engine, part))
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, False, False, True], "the first batch of the new size is whole"


@on_ranks(2)
def test_state_on_a_disk_changes_nothing() -> None:
    from zeropg.deepspeed import utils

    data = batches()[:2]
    with tempfile.TemporaryDirectory(prefix="zeropg-engine-") as folder:
        block = {"device": "nvme", "nvme_path": folder}
        engine = make_engine(2, zero_optimization={"stage": 2, "offload_optimizer": block})
        whole = make_engine(2)
        assert train(engine, data) == train(whole, data)
        key = "blocks.0.up.weight"
        states = [utils.safe_get_full_optimizer_state(e.module.get_parameter(key), "exp_avg") for e in (engine, whole)]
        assert torch.equal(*states)
        with raises(NotImplementedError, "it is in a file", "safe_get_full_optimizer_state"):
            utils.safe_set_full_optimizer_state(engine.module.get_parameter(key), states[0], "exp_avg")


@on_ranks(2)
def test_the_norm_is_that_of_one_process() -> None:
    _, norms = train_plain(batches()[:3])
    for stage in (0, 3):
        engine = make_engine(stage)
        for batch, expected in zip(batches(), norms, strict=False):
            train(engine, batch[None])
            assert engine.get_global_grad_norm().item() == pytest.approx(expected, rel=1e-5)


# Steps whose loss is infinite on one rank, and the scale after each step: window 2, hysteresis 2, from 2**4.
OVERFLOWS = {3, 4, 5, 9}
SCALES = [16, 16, 32, 32, 16, 8, 8, 8, 16, 16, 16, 16, 32]
FP16: dict[str, Any] = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "min_loss_scale": 4}


def overflow_on_rank_1(engine: Any, overflows: bool) -> None:
    loss = loss_of(engine, own_parts(batches()[0], 1)[0])
    engine.backward(loss * torch.inf if overflows and dist.get_rank() == 1 else loss)
    engine.step()


@on_ranks(2, timeout=120)
def test_the_loss_scale_moves_as_deepspeeds_does() -> None:
    import zeropg

    for stage in (1, 3):
        engine = make_engine(stage, fp16=FP16)
        assert engine.loss_scale() == 0 and engine.cur_scale == 16
        scales = []
        for step in range(len(SCALES)):
            before = zeropg.full_state_dict(engine.module, rank0_only=False)
            overflow_on_rank_1(engine, step in OVERFLOWS)
            after = zeropg.full_state_dict(engine.module, rank0_only=False)
            is_same = all(torch.equal(before[name], after[name]) for name in before)
            assert is_same == (step in OVERFLOWS) == (not engine.was_step_applied())
            scales.append(engine.cur_scale)
        assert scales == SCALES
        assert engine.skipped_steps == len(OVERFLOWS) and engine.global_steps == len(SCALES)


@on_ranks(2)
def test_the_loss_scale_ends_at_its_least() -> None:
    engine = make_engine(2, fp16=FP16 | {"hysteresis": 1})
    overflow_on_rank_1(engine, True)
    overflow_on_rank_1(engine, True)
    assert engine.cur_scale == 4
    before = engine._scaler.state_dict()
    with raises(RuntimeError, "least loss scale, 4"):
        overflow_on_rank_1(engine, True)
    assert engine._scaler.state_dict() == before
    overflow_on_rank_1(engine, False)
    assert engine.was_step_applied(), "a program may go on"
    consecutive = make_engine(2, fp16=FP16 | {"consecutive_hysteresis": True})
    for step in range(6):
        overflow_on_rank_1(consecutive, step % 2 == 0)
    assert consecutive.cur_scale == 16, "each good step fills the hysteresis"
    static = make_engine(2, fp16={"enabled": True, "loss_scale": 128})
    overflow_on_rank_1(static, True)
    assert static.loss_scale() == static.cur_scale == 128 and static.skipped_steps == 1


@on_ranks(2)
def test_after_a_step_that_raises_a_batch_begins_anew() -> None:
    for stage in (1, 3):
        engine = make_engine(stage, gas=2, fp16={"enabled": True, "initial_scale_power": 0, "hysteresis": 1})
        overflow_on_rank_1(engine, False)
        with raises(RuntimeError, "least loss scale"):
            overflow_on_rank_1(engine, True)
        updated = []
        for _ in range(4):
            overflow_on_rank_1(engine, False)
            updated.append(engine.was_step_applied())
        assert updated == [False, True, False, True] and engine.global_steps == 2


@on_ranks(2)
def test_after_a_step_that_raises_fp16_goes_on() -> None:
    engine = make_engine(1, fp16=FP16)
    rate, updated = engine.optimizer.param_groups[0]["lr"], []
    for step in range(3):
        engine.optimizer.param_groups[0]["lr"] = rate * (1 + dist.get_rank() if step == 0 else 1)
        try:
            overflow_on_rank_1(engine, False)
            updated.append(engine.was_step_applied())
        except RuntimeError as error:
            updated.append("rank 1 steps with param groups of other numbers" in str(error))
    assert updated == [True, True, True] and engine.global_steps == 2


@on_ranks(2)
def test_gradients_that_the_program_replaces_are_divided_as_others() -> None:
    def update(stage: int, replaces: bool) -> dict[str, torch.Tensor]:
        engine = make_engine(stage, gas=2)
        for part in own_parts(batches()[0], 2):
            loss_of(engine, part).backward()
            if replaces and engine.is_gradient_accumulation_boundary():
                for parameter in engine.module.parameters():
                    parameter.grad = parameter.grad * 1
            engine.step()
        return zeropg.full_state_dict(engine.module, rank0_only=False)

    for stage in (0, 1):
        expected, found = update(stage, False), update(stage, True)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(2)
def test_a_batch_size_does_not_change_between_a_loss_and_its_step() -> None:
    engine = make_engine(0, gas=4)
    size = engine.train_batch_size()
    part = own_parts(batches()[0], 4)[0]
    engine.backward(loss_of(engine, part))
    with raises(ValueError, "a loss of this update was divided by 4"):
        engine.set_train_batch_size(size // 2)
    engine.zero_grad()
    engine.set_train_batch_size(size // 2)
    for _ in range(2):
        engine.backward(loss_of(engine, part))
        engine.step()
    assert engine.was_step_applied()


@on_ranks(2)
def test_gradients_of_inputs_and_checkpoints_around_the_engine_are_no_backwards_of_their_own() -> None:
    for stage in (1, 3):
        engine, _, *_ = zeropg.initialize(
            model=nn.Linear(4, 4), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), config=configuration(stage, gas=2)
        )
        plain = nn.Linear(4, 4)
        plain.load_state_dict(zeropg.full_state_dict(engine.module, rank0_only=False))
        for _ in range(2):
            x = torch.ones(2, 4, requires_grad=True)
            output = checkpoint(engine, x, use_reentrant=True)
            engine.backward(output.square().mean())
            plain(x).square().mean().div(2).backward()
            asked = torch.ones(2, 4, requires_grad=True)
            (found,) = torch.autograd.grad(engine(asked).sum(), asked)
            torch.testing.assert_close(found, plain.weight.detach().sum(0).expand(2, 4))
            engine.step()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        after = zeropg.full_state_dict(engine.module, rank0_only=False)
        torch.testing.assert_close(after["weight"], plain.weight.detach())


@on_ranks(2)
def test_sixteen_bits_learn_and_want_a_scaled_loss() -> None:
    plain, _ = train_plain(batches())
    for block in ({"bf16": {"enabled": True}}, {"fp16": FP16 | {"initial_scale_power": 8}}):
        engine = make_engine(3, gas=2, **block)
        assert train(engine, batches()) == pytest.approx(plain, rel=0.02)
        loss = loss_of(engine, own_parts(batches()[0], 2)[0])
        if "fp16" in block:
            with raises(RuntimeError, "fp16 needs a loss scaled by this engine"):
                loss.backward(retain_graph=True)
            engine.zero_grad()
        for _ in range(2):
            engine.scale(loss_of(engine, own_parts(batches()[0], 2)[0])).backward()
            engine.step()
        assert engine.was_step_applied()


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(5, 4))


@on_ranks(2)
def test_optimizer_scheduler_and_loader_of_the_configuration() -> None:
    from zeropg import deepspeed

    blocks = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}},
        "fp16": FP16,
    }
    model = nn.Linear(4, 4)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, training_data=Squares(), config=configuration(2, **blocks) | {"train_batch_size": 4}
    )
    assert engine.optimizer is optimizer and engine.lr_scheduler is scheduler and engine.module is model
    assert len(loader) == 3 and engine.get_lr() == [optimizer.param_groups[0]["lr"]]
    rows = [batch[:, 0] for batch in loader]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, torch.cat(rows).tolist())
    assert sorted(set(gathered[0] + gathered[1])) == list(range(9)), "an epoch has every sample"
    assert [len(row) for row in rows] == [2, 2, 1]
    in_order = [batch[0, 0].item() for batch in engine.deepspeed_io(Squares(), route="eval")]
    assert in_order == [dist.get_rank(), dist.get_rank() + 4, 8 if dist.get_rank() == 0 else 0]
    for route in ("train", "eval"):
        assert [len(batch) for batch in engine.deepspeed_io(Stream(), route=route)] == [2, 2, 1]
    endless = deepspeed.RepeatingLoader(loader)
    rates = []
    for step in range(4):
        batch = next(endless)
        engine.backward(engine(batch).float().square().mean() * (torch.inf if step == 1 else 1.0))
        engine.step()
        rates.append(engine.get_lr()[0])
    assert rates[1] == rates[0] < rates[2], "the scheduler waits where a step was left out"


@on_ranks(2)
def test_what_the_program_made_is_used() -> None:
    from zeropg import deepspeed

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        seen.extend(parameters)
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)

    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=make,
        model_parameters=model[1].parameters(),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5),
        config=configuration(3),
    )
    assert seen == list(model[1].parameters()) and optimizer.defaults["momentum"] == 0.5
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    assert engine.get_lr() == [0.5] and engine.get_mom() == [0.5]
    assert engine.append == model.append, "what the engine has not is the model's"


@on_ranks(2)
def test_bad_input_is_one_clear_sentence() -> None:
    from zeropg import deepspeed

    model = make_model()
    with raises(TypeError, "model is a str"):
        deepspeed.initialize(model="gpt", config=configuration(0))
    with raises(ValueError, "no configuration", "--deepspeed_config"):
        deepspeed.initialize(model=model)
    with raises(ValueError, "config and config_params"):
        deepspeed.initialize(model=model, config={}, config_params={})
    with raises(ValueError, "train_batch_size is 16", "* 2 ranks = 6"):
        deepspeed.initialize(model=model, config=configuration(0) | {"train_micro_batch_size_per_gpu": 3})
    with raises(ValueError, "made for an optimizer that is not passed"):
        scheduler = torch.optim.lr_scheduler.StepLR(make_optimizer(model), 1)
        deepspeed.initialize(model=model, lr_scheduler=scheduler, config=configuration(0))
    with raises(NotImplementedError, "mesh_param"):
        deepspeed.initialize(model=model, mesh_param=(1, 2), config=configuration(0))
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=configuration(2))
    assert optimizer is None and loader is None and scheduler is None
    loss = loss_of(engine, own_parts(batches()[0], 1)[0])
    with raises(RuntimeError, "has no optimizer"):
        engine.backward(loss)
    with raises(ValueError, "sharded already", "one model has one engine"):
        deepspeed.initialize(model=model, config=configuration(2))
    with raises(ValueError, "model is an engine already"):
        deepspeed.initialize(model=engine, config=configuration(2))
    engine = make_engine(2)
    with raises(RuntimeError, "no parameter has a gradient", "engine.backward(loss)"):
        engine.step()
    with raises(ValueError, "the loss is shape [3]"):
        engine.backward(torch.ones(3, requires_grad=True))
    with raises(ValueError, "the loss is float"):
        engine.backward(1.0)
    engine.backward(loss_of(engine, own_parts(batches()[0], 1)[0]))
    with raises(RuntimeError, "the engine steps this optimizer", "call engine.step()"):
        engine.optimizer.step()  # neither unscaled nor clipped
    engine.step()
    assert engine.was_step_applied()
    with raises(AttributeError, "engine.allreduce_gradients is not available", "engine.no_sync()"):
        engine.allreduce_gradients()
    with raises(AttributeError, "deepspeed.init_inference is not available"):
        deepspeed.init_inference(model)
    assert not hasattr(engine, "train_batch") and hasattr(engine, "blocks")


def in_bf16(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


class Weighted(nn.Module):
    """Its loss is of labels, which 16 bits would round."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.seen = [each.dtype for each in (x, labels, *(() if mask is None else (mask,)))]
        return (self.layer(x).sum(1).float() - labels).square().mean()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_labels_and_masks_keep_their_dtype(stage: int) -> None:
    config = in_bf16(stage)
    engine = zeropg.initialize(model=Weighted(), config=config)[0]
    x, labels = torch.ones(4, 8), torch.full((4,), 123.456)
    engine.backward(engine(x.bfloat16(), labels, mask=torch.full((4, 4), torch.finfo(torch.float32).min)))
    engine.step()
    assert engine.module.seen == [torch.bfloat16, torch.float32, torch.float32]
    # A model that refuses what it gets has all of it cast from then on.
    for _ in range(2):
        engine.backward(engine(x, labels))
        engine.step()
        assert engine.module.seen == [torch.bfloat16, torch.bfloat16]
    fp16 = {**config, "bf16": {"enabled": False}, "fp16": {"enabled": True, "auto_cast": True}}
    engine = zeropg.initialize(model=Weighted(), config=fp16)[0]
    engine(x, labels)
    assert engine.module.seen == [torch.float16, torch.float16]


class Positioned(nn.Module):
    """Adds a table of positions to what 16 bits have made, and a layer gets both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("positions", torch.linspace(0, 1, 8))
        self.register_buffer("order", torch.arange(8))
        self.tied = nn.Module()
        self.tied.register_buffer("positions", self.positions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[:, self.order] + self.tied.positions)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_buffers_are_cast_where_the_configuration_says_so(stage: int) -> None:
    config = in_bf16(stage)
    engine = zeropg.initialize(model=Positioned(), config=config)[0]
    for x in (torch.ones(4, 8), torch.ones(4, 8, dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError, match="same dtype") as refused:
            engine(x)
        assert "data_types.buffer_dtype" in refused.value.__notes__[0]
        assert not engine._state.casts_inputs and engine.module.positions.dtype == torch.float32
    engine = zeropg.initialize(model=Positioned(), config={**config, "data_types": {"buffer_dtype": "bf16"}})[0]
    assert torch.equal(engine(torch.ones(4, 8)), Positioned().bfloat16()(torch.ones(4, 8).bfloat16()))
    assert engine.module.tied.positions is engine.module.positions and engine.module.order.dtype == torch.int64
    engine.backward(engine(torch.ones(4, 8)).float().square().mean())
    engine.step()


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "AdamW", "params": {"lr": "1e-3"}}, "optimizer.params.lr is '1e-3', a text; expected a number"),
        ({"type": "AdamW", "params": {"betas": [0.9]}}, "optimizer.params.betas is [0.9]; expected 2 numbers"),
        ({"type": "AdamW", "params": {"lr": -1}}, "optimizer.params: Invalid learning rate: -1"),
        ({"params": {"lr": 1e-3}}, "optimizer.type is missing"),
    ],
)
@on_ranks(2)
def test_values_of_an_optimizer_are_checked_before_anything_is_made(block: dict[str, Any], words: str) -> None:
    with raises(ValueError, words):
        zeropg.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 2, "optimizer": block})


@on_ranks(2)
def test_what_is_no_dataset_is_refused() -> None:
    loader: Any = torch.utils.data.DataLoader([torch.ones(2)] * 4)
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with raises(TypeError, "training_data is a DataLoader; expected a torch Dataset"):
        zeropg.initialize(model=nn.Linear(2, 2), config=config, training_data=loader)


@on_ranks(2)
def test_a_configuration_of_one_rank_alone_is_said_on_all() -> None:
    good: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    rank = dist.get_rank()
    for bad, words in (
        ({**good, "gradient_clipping": 0.5}, ("gradient_clipping is '1.0' on rank 0, but '0.5' on rank 1",)),
        ({**good, "optimizer": {"type": "Adam", "params": {}}}, ("optimizer.", "on rank 1")),
        ({**good, "train_batch_sise": 2}, ("unknown key 'train_batch_sise'",)),
        ("{", ("'{'",)),
    ):
        with raises(ValueError, *words):
            zeropg.initialize(model=nn.Linear(2, 2), config=good if rank == 0 else bad)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@on_ranks(2)
def test_batch_norms_compute_in_sixteen_bits(stage: int, precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        precision: {"enabled": True},
    }
    engine = zeropg.initialize(model=model, config=settings)[0]
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(20):
        loss = (engine(x).float() - x[:, :1]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[2]
    engine.destroy()
    with raises(RuntimeError, "this engine was destroyed"):
        engine.step()
    engine.eval()
    assert model[1].running_mean.dtype == (torch.bfloat16 if precision == "bf16" else torch.float16)
    assert engine(x).isfinite().all() and model[1].running_mean.any()
