"""States that move out of a device between steps, come back to the last bit, and are missed with a clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from tests.deepspeed.training import STAGES, batches, make_engine, own_parts, train
from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import loss_of, make_model

NAMES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


def moving(engine: Any) -> Any:
    """The engine as on a device: what moves gets other memory, and the one before is freed."""
    engine._state_offload._moves = True
    return engine


def values_of(engine: Any) -> list[torch.Tensor]:
    """Masters, whole parameters and Adam's state of this rank, in copies."""
    import zeropg

    values = [shard.clone() for _, shard, _, _ in zeropg.local_shards(engine.module)]
    values += [shard.tensor.clone() for shard in engine.optimizer.local_state()]
    with zeropg.full_parameters(engine.module):
        values += [parameter.detach().clone() for parameter in engine.module.parameters()]
    return values


def own_part() -> torch.Tensor:
    return own_parts(batches()[0], 1)[0]


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@on_ranks(2, backend=("zeropg", "gloo"))  # gloo: stage 3 gathers what lies in memory of its own
def test_training_goes_on_to_the_bit_after_a_trip(precision: dict[str, Any]) -> None:
    data = batches()[:3]
    for stage in STAGES:
        plain, engine = make_engine(stage, **precision), moving(make_engine(stage, **precision))
        assert train(engine, data[:1]) == train(plain, data[:1])
        before = values_of(engine)
        for include in (None, *([name] for name in NAMES)):
            engine.offload_states(include=include)
            engine.reload_states()
            assert all(map(torch.equal, values_of(engine), before)), (stage, include)
        engine.offload_states(["hp_params"])
        engine.offload_states(["hp_params", "optim_states"], pin_memory=False, non_blocking=True)
        engine.reload_states(non_blocking=True)
        engine.reload_states()
        assert train(engine, data[1:]) == train(plain, data[1:]), stage


@on_ranks(2, backend="gloo")
def test_memory_is_freed() -> None:
    for stage in (0, 3):
        engine = moving(make_engine(stage, bf16={"enabled": True}))
        train(engine, batches()[:1])
        group = next(group for group in engine.module._zeropg.flat_groups if group.is_trainable)
        held = [group.master.untyped_storage(), group.parameter_out.untyped_storage()]
        state = next(iter(engine.optimizer.state.values()))["exp_avg"]
        held.append(state.untyped_storage())
        alive = [StorageWeakRef(storage) for storage in held]
        del held
        engine.offload_states()
        assert all(reference.expired() for reference in alive)
        assert engine.module._zeropg.memory_report()["buckets"] == 0
        engine.reload_states()


@on_ranks(2)
def test_what_is_away_is_missed_with_a_clear_error() -> None:
    import zeropg

    for is_moving in (False, True):
        for stage in STAGES:
            engine = make_engine(stage)
            engine = moving(engine) if is_moving else engine
            train(engine, batches()[:1])
            part = own_part()
            engine.offload_states()
            calls = {
                "forward": lambda engine=engine, part=part: engine(part[:, :-1]),
                "full_parameters": lambda engine=engine: zeropg.full_parameters(engine.module).__enter__(),
                "full_state_dict": lambda engine=engine: zeropg.full_state_dict(engine.module),
                "local_shards": lambda engine=engine: list(zeropg.local_shards(engine.module)),
                "writable_shards": lambda engine=engine: zeropg.writable_shards(engine.module).__enter__(),
                "save_checkpoint": lambda engine=engine: engine.save_checkpoint("nowhere"),
            }
            for name, call in calls.items():
                with raises((RuntimeError, ValueError), "offloaded", "reload_states"):
                    call()
                assert engine.module.training, name
            engine.reload_states()
            loss = loss_of(engine, part)
            engine.offload_states(["contiguous_grad_buffer"])
            with raises(RuntimeError, "backward: buffers are offloaded", "engine.reload_states()"):
                engine.backward(loss)
            engine.reload_states()
            engine.zero_grad()
            # The optimizer may be away until its step.
            engine.offload_states(["optim_states", "hp_params"])
            engine.backward(loss_of(engine, part))
            with raises(RuntimeError, "step:", "are offloaded", "engine.reload_states()"):
                engine.step()
            engine.reload_states()
            engine.step()
            assert engine.was_step_applied()


@on_ranks(2)
def test_gradients_move_where_only_shards_are_kept() -> None:
    for stage in STAGES:
        plain, engine = make_engine(stage), moving(make_engine(stage))
        for one in (plain, engine):
            one.backward(loss_of(one, own_part()))
        if stage < 2:  # `.grad` shows them
            with raises(RuntimeError, "offload_states", "engine.step()", "lp_grads"):
                engine.offload_states()
            engine.offload_states(["optim_states", "hp_params", "lp_params"])
            assert engine.module.blocks[0].up.weight.grad is not None
        else:
            engine.offload_states()
        engine.reload_states()
        for one in (plain, engine):
            one.step()
        assert engine.get_global_grad_norm() == plain.get_global_grad_norm()
        assert all(map(torch.equal, values_of(engine), values_of(plain))), stage


@on_ranks(2)
def test_other_optimizers_take_their_state_along() -> None:
    from zeropg import deepspeed, optim

    for make in (
        lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9),
        lambda parameters: optim.LAMB(parameters, lr=1e-3),
        lambda parameters: optim.Muon(parameters, lr=1e-3),
    ):
        losses = []
        for is_moving in (False, True):
            config = {"train_batch_size": 16, "zero_optimization": {"stage": 2}}
            engine, *_ = deepspeed.initialize(model=make_model(), optimizer=make, config=config)
            train(engine, batches()[:1])
            if is_moving:
                moving(engine).offload_states()
                engine.reload_states()
            losses.append(train(engine, batches()[1:4]))
        assert losses[0] == losses[1]


@on_ranks(2)
def test_a_cpu_model_says_once_that_nothing_moves() -> None:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zeropg")
    logger.addHandler(handler)
    try:
        engine = make_engine(3)
        for _ in range(2):
            engine.offload_states()
            engine.reload_states()
        engine.offload_states(device="none")
    finally:
        logger.removeHandler(handler)
    expected = ["nothing moves", "device is 'none'"] if dist.get_rank() == 0 else []
    assert len(said) == len(expected) and all(word in text for word, text in zip(expected, said, strict=True))


@on_ranks(2)
def test_bad_arguments_are_named() -> None:
    from zeropg.deepspeed.zero import OffloadDeviceEnum, OffloadStateTypeEnum

    engine = make_engine(1)
    with raises(ValueError, "device is 'nvme'", "offload_optimizer"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with raises(ValueError, "'optimizer_states'", "optim_states"):
        engine.offload_states(include=["optimizer_states"])
    engine.offload_states([OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)
    engine.reload_states()
