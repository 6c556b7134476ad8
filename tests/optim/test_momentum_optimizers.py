"""OneBitAdam, ZeroOneAdam, OneBitLamb and DGC under DistributedDataParallel."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import LEARNING_RATE, loss_of, make_batches, make_model
from zeropg.compression import BlockQuant, State, ddp_hook
from zeropg.optim import DGC, OneBitAdam, OneBitLamb, ZeroOneAdam
from zeropg.optim.momentum_optimizer import MomentumOptimizer
from zeropg.optim.zero_one_adam import variance_learns

WARMUP_STEPS = 8
ADAM = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def one_bit_adam(model: nn.Module, **options: Any) -> OneBitAdam:
    return OneBitAdam(model.parameters(), LEARNING_RATE, **{"warmup_steps": WARMUP_STEPS, **ADAM, **options})


def learning_adam(model: nn.Module, **options: Any) -> OneBitAdam:
    return one_bit_adam(model, **{"variance_interval": 3, **options})


def zero_one_adam(model: nn.Module, **options: Any) -> ZeroOneAdam:
    return ZeroOneAdam(model.parameters(), LEARNING_RATE, **{"warmup_steps": WARMUP_STEPS, **ADAM, **options})


def one_bit_lamb(model: nn.Module, **options: Any) -> OneBitLamb:
    return OneBitLamb(model.parameters(), 2e-2, **{"warmup_steps": WARMUP_STEPS, **ADAM, **options})


def dgc(model: nn.Module, **options: Any) -> DGC:
    return DGC(model.parameters(), 0.1, 0.9, **{"ratio": 0.05, "warmup_steps": WARMUP_STEPS, **options})


Make = Callable[..., MomentumOptimizer]
each_optimizer = pytest.mark.parametrize("make", [one_bit_adam, learning_adam, zero_one_adam, one_bit_lamb, dgc])


def make_ddp(make: Make, **options: Any) -> tuple[DDP, MomentumOptimizer]:
    model = make_model()
    optimizer = make(model, **options)
    ddp = DDP(model, bucket_cap_mb=0.05)
    optimizer.attach(ddp)
    return ddp, optimizer


def own_part(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> list[float]:
    losses = []
    for batch in batches:
        loss = loss_of(ddp, own_part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average = loss.detach().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        losses.append(average.item())
    return losses


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def expect_same_bits_on_all_ranks(tensor: torch.Tensor) -> None:
    rank0 = tensor.clone()
    dist.broadcast(rank0, 0)
    assert torch.equal(tensor, rank0)


def train_adamw(batches: torch.Tensor) -> tuple[list[float], nn.Module]:
    ddp = DDP(make_model(), bucket_cap_mb=0.05)
    return train(ddp, torch.optim.AdamW(ddp.parameters(), LEARNING_RATE, **ADAM), batches), ddp


@on_ranks(2)
def test_warm_up_has_the_bits_of_adamw() -> None:
    batches = make_batches(WARMUP_STEPS)
    expected, plain = train_adamw(batches)
    ddp, optimizer = make_ddp(one_bit_adam)
    assert train(ddp, optimizer, batches) == expected
    assert torch.equal(flat(ddp), flat(plain))


@on_ranks(2)
def test_one_bit_adam_learns_about_as_adamw_does() -> None:
    batches = make_batches(60)
    expected, _ = train_adamw(batches)
    ddp, optimizer = make_ddp(one_bit_adam, warmup_steps=15)
    losses = train(ddp, optimizer, batches)
    assert losses[:15] == expected[:15]
    end, expected_end = sum(losses[-10:]) / 10, sum(expected[-10:]) / 10
    assert end < 1.05 * expected_end, (losses, expected)


@on_ranks(2)
def test_between_frozen_steps_the_variance_learns_from_averaged_gradients() -> None:
    """Beside Adam written out; the model is so small that its momenta travel in fp32."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    beta1, beta2, interval, warmup = 0.9, 0.8, 3, 4
    options = {"betas": (beta1, beta2), "weight_decay": 0.0, "eps": 1e-8}
    optimizer = OneBitAdam(model.parameters(), 0.05, warmup_steps=warmup, variance_interval=interval, **options)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    ddp = DDP(model)
    optimizer.attach(ddp)
    inputs = torch.randn(2, 14, 5, 8)
    momenta, variances = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(14):
        of_ranks = []
        for rank in range(2):
            copies = [weight.clone().requires_grad_() for weight in weights]
            nn.functional.linear(inputs[rank, step], *copies).square().sum().backward()
            of_ranks.append([weight.grad for weight in copies])
        optimizer.zero_grad()
        ddp(inputs[dist.get_rank(), step]).square().sum().backward()
        optimizer.step()
        learns = step < warmup or (step + 1 - warmup) % interval == 0
        share = 1 - (beta2 if step < warmup else beta2**interval)
        for index, weight in enumerate(weights):
            gradient = (of_ranks[0][index] + of_ranks[1][index]) / 2
            momenta[index].lerp_(gradient, 1 - beta1)
            if learns:
                variances[index].mul_(1 - share).addcmul_(gradient, gradient, value=share)
            bias = 1 - beta2 ** (step + 1) if step < warmup else 1.0
            weight -= 0.05 / (1 - beta1 ** (step + 1)) * momenta[index] / ((variances[index] / bias).sqrt() + 1e-8)
            if step + 1 == warmup:
                variances[index] /= 1 - beta2**warmup
        torch.testing.assert_close(flat(ddp), torch.cat([weight.flatten() for weight in weights]), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_zero_one_adam_is_the_papers_with_a_variance_free_of_its_bias() -> None:
    """Algorithm 1 where every step synchronizes, written out; the model is so small that momenta travel in fp32."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    beta1, beta2, decay = 0.9, 0.8, 0.1
    optimizer = ZeroOneAdam(model.parameters(), 0.05, (beta1, beta2), 1e-8, decay, warmup_steps=2, variance_until=9)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    ddp = DDP(model)
    optimizer.attach(ddp)
    inputs = torch.randn(2, 14, 5, 8)
    inputs[:, :3, :, 0] = 0  # so that some elements begin with step 4
    momenta, variances, biases = ([torch.zeros_like(weight) for weight in weights] for _ in range(3))
    for step in range(1, 15):
        averages = [torch.zeros_like(weight) for weight in weights]
        for rank in range(2):
            copies = [weight.clone().requires_grad_() for weight in weights]
            nn.functional.linear(inputs[rank, step - 1], *copies).square().sum().backward()
            for average, one in zip(averages, copies, strict=True):
                average.add_(one.grad, alpha=0.5)
        optimizer.zero_grad()
        averaged = optimizer.averages_gradients()
        assert averaged is (step in {1, 2, 4, 6, 8})
        ddp(inputs[dist.get_rank(), step - 1]).square().sum().backward()
        optimizer.step()
        for weight, average, m, v, bias in zip(weights, averages, momenta, variances, biases, strict=True):
            m.lerp_(average, 1 - beta1)  # the average of what ranks would have of their own gradients
            if averaged:
                begins = (v == 0) & (step > 2)
                v.mul_(beta2).addcmul_(average, average, value=1 - beta2)
                bias.mul_(beta2).add_(1 - beta2)
                begins &= average != 0
                v[begins] = (average**2 + m**2)[begins] * bias[begins]
            weight.mul_(1 - 0.05 * decay)
            direction = m / (1 - beta1**step) / ((v / bias.clamp(min=1e-9)).sqrt() + 1e-8)
            weight.sub_(direction.masked_fill(v == 0, 0.0), alpha=0.05)
        torch.testing.assert_close(flat(ddp), torch.cat([weight.flatten() for weight in weights]), rtol=1e-4, atol=1e-5)


def test_the_intervals_of_zero_one_adam_double_as_deepspeed_counts_them() -> None:
    for per_interval in (1, 2, 3, 16):
        interval, counter, learns = 1, 0, []
        for step in range(1, 400):
            if step % interval == 0:
                learns.append(step)
                counter += 1
                if counter == per_interval:
                    interval, counter = 2 * interval, 0
        found = [step for step in range(1, 400) if variance_learns(step, per_interval, 10**6)]
        assert found == learns
        assert [step for step in learns if variance_learns(step, per_interval, 20)] == [s for s in learns if s <= 20]


@on_ranks(2)
def test_elements_that_come_late_begin_with_a_step_in_which_the_variance_learns() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32))
    optimizer = zero_one_adam(model, warmup_steps=3, weight_decay=0.0)  # its variance learns in 1, 2, 3, 4, 6, 8, 12
    ddp = DDP(model)
    optimizer.attach(ddp)
    moved = []
    for step in range(1, 13):
        before = model[0].weight.detach().clone()
        (ddp(torch.arange(24 if step < 5 else 64)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lengths = (model[0].weight.detach() - before).abs()
        assert lengths[24:].max() < 20 * LEARNING_RATE  # as those of other elements in one-bit steps
        moved.append(bool(lengths[24:].any()))
    assert moved == [False] * 5 + [True] * 7


@each_optimizer
@on_ranks(2)
def test_all_ranks_have_the_same_bits_and_learn(make: Make) -> None:
    ddp, optimizer = make_ddp(make)
    losses = train(ddp, optimizer, make_batches())
    assert losses[-1] < 0.8 * losses[0], losses
    expect_same_bits_on_all_ranks(flat(ddp))


@each_optimizer
@on_ranks(2)
def test_a_saved_run_goes_on_to_the_bit(make: Make) -> None:
    """Before and after the change of phase, loaded before and after `attach`."""
    batches = make_batches(14)
    for at, loads_first in ((4, True), (10, False)):
        ddp, optimizer = make_ddp(make)
        train(ddp, optimizer, batches[:at])
        saved = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict()))
        train(ddp, optimizer, batches[at:])
        model = make_model()
        model.load_state_dict(saved[0])
        again = make(model)
        if loads_first:
            again.load_state_dict(saved[1])
        again_ddp = DDP(model, bucket_cap_mb=0.05)
        again.attach(again_ddp)
        if not loads_first:
            again.load_state_dict(saved[1])
        train(again_ddp, again, batches[at:])
        torch.testing.assert_close(flat(again_ddp), flat(ddp), rtol=0, atol=1e-6)


def owed(optimizer: torch.optim.Optimizer, numels: dict[str, int]) -> dict[str, torch.Tensor]:
    """What all ranks together still owe the average, by parameter."""
    debts = {name: torch.zeros(numel) for name, numel in numels.items()}
    saved = optimizer.state_dict()["zeropg"]["debts"]
    for name, hop, start, values in saved["residuals"]:
        debts[name][start : start + len(values)] += values if hop == 1 else values / dist.get_world_size()
    for debt in debts.values():
        dist.all_reduce(debt)
    return debts


@on_ranks(2)
def test_nothing_of_a_momentum_is_lost() -> None:
    """What arrives and what is owed afterwards is what ranks had and what was owed before."""
    batches = make_batches(14)
    ddp, optimizer = make_ddp(one_bit_adam)
    train(ddp, optimizer, batches[:12])
    numels = {name: parameter.numel() for name, parameter in ddp.module.named_parameters()}
    momenta = {p: optimizer.state[p]["exp_avg"].clone() for p in ddp.module.parameters()}
    before = owed(optimizer, numels)
    assert any(debt.any() for debt in before.values())
    loss_of(ddp, own_part(batches[12])).backward()
    wanted = {}
    for name, parameter in ddp.module.named_parameters():
        wanted[name] = momenta[parameter].lerp(parameter.grad, 1 - 0.9).flatten()
        dist.all_reduce(wanted[name], dist.ReduceOp.AVG)
    optimizer.step()
    after = owed(optimizer, numels)
    for name, parameter in ddp.module.named_parameters():
        state = optimizer.state[parameter]
        found = state["exp_avg"].flatten() + state["momentum_scale"] * (after[name] - before[name])
        torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-7)


@on_ranks(2)
def test_gradients_stay_local_after_warm_up() -> None:
    batches = make_batches(WARMUP_STEPS + 2)
    ddp, optimizer = make_ddp(one_bit_adam)
    train(ddp, optimizer, batches[:WARMUP_STEPS])
    with ddp.no_sync():
        loss_of(ddp, own_part(batches[-1])).backward()
    loss_of(ddp, own_part(batches[-2])).backward()
    alone = copy.deepcopy(ddp.module)
    alone.zero_grad()
    (loss_of(alone, own_part(batches[-1])) + loss_of(alone, own_part(batches[-2]))).backward()
    for mine, theirs in zip(alone.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@each_optimizer
@on_ranks(2)
def test_elements_that_nobody_has_used_stay(make: Make) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32))
    options = {"warmup_steps": 3} | ({} if make is dgc else {"weight_decay": 0.0})
    optimizer = make(model, **options)
    ddp = DDP(model)
    optimizer.attach(ddp)
    first = model[0].weight.detach().clone()
    for step in range(9):
        tokens = torch.arange(16) + 16 * dist.get_rank() + step % 2
        (ddp(tokens) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model[0].weight[40:], first[40:])
    assert not torch.equal(model[0].weight[:32], first[:32])


@pytest.mark.parametrize("make", [one_bit_adam, learning_adam])
@on_ranks(2)
def test_elements_first_used_after_warm_up_stay(make: Make) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32))
    optimizer = make(model, warmup_steps=3, weight_decay=0.0)
    ddp = DDP(model)
    optimizer.attach(ddp)
    first = model[0].weight.detach().clone()
    for step in range(12):
        tokens = torch.arange(24 if step < 3 else 64)
        (ddp(tokens) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model[0].weight[24:], first[24:])
    assert not torch.equal(model[0].weight[:24], first[:24])


@on_ranks(2)
def test_a_state_saved_before_there_was_an_interval_keeps_it() -> None:
    ddp, optimizer = make_ddp(learning_adam)
    train(ddp, optimizer, make_batches(2))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["variance_interval"]
    optimizer.load_state_dict(saved)
    assert [group["variance_interval"] for group in optimizer.param_groups] == [3]


@on_ranks(2)
def test_warm_up_gradients_may_be_encoded_too() -> None:
    batches = make_batches()
    expected, _ = train_adamw(batches)
    ddp, optimizer = make_ddp(one_bit_adam, warmup_codec=BlockQuant(4))
    losses = train(ddp, optimizer, batches[:4])
    saved = copy.deepcopy(optimizer.state_dict())
    losses += train(ddp, optimizer, batches[4:])
    assert losses[:WARMUP_STEPS] != expected[:WARMUP_STEPS]
    assert losses[-1] < 1.1 * expected[-1]
    expect_same_bits_on_all_ranks(flat(ddp))
    _, again = make_ddp(one_bit_adam, warmup_codec=BlockQuant(4))
    again.load_state_dict(saved)
    owed, wanted = (each["zeropg"]["warmup_debts"]["residuals"] for each in (again.state_dict(), saved))
    assert len(owed) == len(wanted) > 0
    for one, other in zip(owed, wanted, strict=True):
        assert one[:3] == other[:3] and torch.equal(one[3], other[3])


@on_ranks(2)
def test_clipping_in_warm_up_is_torchs_and_later_each_ranks_own() -> None:
    batches = make_batches(WARMUP_STEPS + 1)
    plain = DDP(make_model())
    adamw = torch.optim.AdamW(plain.parameters(), LEARNING_RATE, **ADAM)
    ddp, optimizer = make_ddp(one_bit_adam, clip=0.5)
    for batch in batches[:WARMUP_STEPS]:
        loss_of(plain, own_part(batch)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
    train(ddp, optimizer, batches[:WARMUP_STEPS])
    torch.testing.assert_close(flat(ddp), flat(plain), rtol=0, atol=1e-6)
    loss_of(ddp, own_part(batches[-1])).mul(100).backward()
    optimizer.step()
    norm = torch.cat([p.grad.flatten() for p in ddp.parameters()]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.5 * 2**0.5), rtol=1e-4, atol=0)


@on_ranks(2)
def test_schedulers_and_param_groups_act_as_usual() -> None:
    batches = make_batches(12)
    results = []
    for kind in (torch.optim.AdamW, OneBitAdam):
        model = make_model()
        matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}
        vectors = {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 1e-2, "weight_decay": 0.0}
        options = {} if kind is torch.optim.AdamW else {"warmup_steps": 12}
        optimizer = kind([matrices, vectors], lr=1e-3, **options)
        ddp = DDP(model)
        if isinstance(optimizer, OneBitAdam):
            optimizer.attach(ddp)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        for batch in batches:
            train(ddp, optimizer, batch[None])
            scheduler.step()
        results.append(flat(ddp))
    assert torch.equal(*results)


@each_optimizer
@on_ranks(2)
def test_bad_use_is_named(make: Make) -> None:
    model = make_model()
    optimizer = make(model)
    ddp = DDP(model)
    loss_of(ddp, make_batches(1)[0]).backward()
    with raises(RuntimeError, "attach(ddp)", "shard_optimizer"):
        optimizer.step()
    with raises(TypeError, "SmallGPT", "expected a DistributedDataParallel", "BlockQuant(4)"):
        optimizer.attach(model)  # type: ignore[arg-type]
    with raises(ValueError, "are not the model's"):
        make(nn.Sequential(model, nn.Linear(2, 2))).attach(ddp)
    with raises(ValueError, "lacks", "trainable parameters"):
        make(model.blocks).attach(ddp)
    hooked = DDP(model)
    hooked.register_comm_hook(State(BlockQuant(4)), ddp_hook)
    with raises(ValueError, "communication hook already"):
        make(model).attach(hooked)
    with raises(NotImplementedError, "float64 on cpu"):
        double = nn.Linear(2, 2).double()
        make(double).attach(DDP(double))
    optimizer.attach(ddp)
    with raises(RuntimeError, "has a model already"):
        optimizer.attach(ddp)
    with raises(RuntimeError, "make it with all parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with raises(ValueError, "warmup_steps"):
        make(model, warmup_steps=-1)
    if make is one_bit_adam:
        for wrong in (-1, 2.5, True):
            with raises(ValueError, f"variance_interval is {wrong!r}", "such as 10"):
                make(model, variance_interval=wrong)
        alike = make(model)
        with raises(ValueError, "variance_interval 0 and 5", "one for all"):
            alike.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "variance_interval": 5})
    if make is zero_one_adam:
        for wrong in (0, 2.5, True):
            with raises(ValueError, f"variance_until is {wrong!r}", "number of a step"):
                make(model, variance_until=wrong)
    if make in (one_bit_lamb, zero_one_adam):
        with raises(ValueError, "variance_interval is 5", "OneBitAdam"):
            make(model).add_param_group({"params": [nn.Parameter(torch.zeros(2))], "variance_interval": 5})
    with raises(ValueError, "clip is -1"):
        make(model, clip=-1)
    gloo = dist.new_group(backend="gloo")
    with raises(ValueError, "needs a group of zeropg", "gloo"):
        make(model).attach(DDP(model, process_group=gloo))


@on_ranks(2)
def test_a_parameter_that_comes_after_warm_up_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.Linear(40, 40)})
    optimizer = OneBitAdam(model.parameters(), warmup_steps=2)
    ddp = DDP(nn.ModuleList([model]), find_unused_parameters=True)
    optimizer.attach(ddp)
    for step in range(3):
        optimizer.zero_grad()
        ddp.module.forward = lambda x, part=model["b" if step == 2 else "a"]: part(x)  # type: ignore[misc]
        ddp(torch.ones(2, 40)).sum().backward()
        if step < 2:
            optimizer.step()
    with raises(ValueError, "first gradient after warm-up", "from the beginning"):
        optimizer.step()


@on_ranks(2)
def test_the_state_of_another_rank_is_taken_without_its_debts() -> None:
    ddp, optimizer = make_ddp(one_bit_adam)
    train(ddp, optimizer, make_batches(12))
    saved = [optimizer.state_dict()]
    dist.broadcast_object_list(saved, 0)
    if dist.get_rank() == 1:
        with pytest.warns(UserWarning, match="this is the state of rank 0"):
            optimizer.load_state_dict(saved[0])
        assert optimizer.state_dict()["zeropg"]["debts"]["residuals"] == []


@each_optimizer
@on_ranks(2)
def test_copies_and_states_of_other_optimizers_are_refused_at_once(make: Make) -> None:
    _, optimizer = make_ddp(make)
    for broken in (copy.deepcopy, pickle.dumps):
        with raises(TypeError, "cannot be copied or pickled", "load its state_dict"):
            broken(optimizer)
    model = make_model()
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        with raises(ValueError, "the param groups lack", "steps", "the state of another optimizer"):
            optimizer.load_state_dict(kind(model.parameters(), lr=0.1).state_dict())
