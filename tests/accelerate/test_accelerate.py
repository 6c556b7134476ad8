"""zeropg.accelerate.prepare on real ranks: accelerate's own loop, with its calls, beside plain accelerate (DDP)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.spawn import run_ranks

pytest.importorskip("accelerate")


def parts(rate: float = 1e-2) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(torch.randn(48, 16, generator=generator))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    return model, optimizer, loader, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def train(accelerator: Any, prepared: Any, epochs: int = 2) -> list[float]:
    model, optimizer, loader, scheduler = prepared
    seen = []
    for _ in range(epochs):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(float(accelerator.gather(loss.detach()[None]).mean()))
    return seen


def same(a: list[float], b: list[float], tolerance: float) -> bool:
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=tolerance) for x, y in zip(a, b, strict=True))


def loops(folder: str) -> list[str]:
    """Every stage beside DDP, and the calls that read or write files. Returns what is wrong."""
    from accelerate import Accelerator
    from safetensors.torch import load_file

    import zeropg

    wrong = []
    plain = Accelerator(cpu=True, gradient_accumulation_steps=2)
    expected = train(plain, plain.prepare(*parts()))
    for stage in range(4):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, loader, scheduler = parts()
        # The optimizer before the model: an order that accelerate allows.
        prepared = zeropg.accelerate.prepare(accelerator, optimizer, model, loader, scheduler, stage=stage)
        prepared = (prepared[1], prepared[0], *prepared[2:])
        if not same(train(accelerator, prepared), expected, 2e-6):
            wrong.append(f"stage {stage} is not DDP")
        if accelerator.unwrap_model(prepared[0]) is not model or not isinstance(accelerator, Accelerator):
            wrong.append("unwrap_model")
        accelerator.save_state(f"{folder}/state{stage}")
        after = train(accelerator, prepared, epochs=1)
        accelerator.load_state(f"{folder}/state{stage}")
        if train(accelerator, prepared, epochs=1) != after:
            wrong.append(f"stage {stage}: load_state")
        accelerator.save_model(model, f"{folder}/model{stage}")
        whole = accelerator.get_state_dict(model)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            saved = load_file(f"{folder}/model{stage}/model.safetensors")
            if saved.keys() != whole.keys() or not all(torch.equal(saved[k], v) for k, v in whole.items()):
                wrong.append(f"stage {stage}: save_model")
        elif whole:
            wrong.append("get_state_dict beside the main process")
        model(torch.ones(2, 16)).sum().backward()
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        with zeropg.full_gradients(model):
            if max(float(p.grad.abs().max()) for p in model.parameters()) > 1.001e-3:
                wrong.append(f"stage {stage}: clip_grad_value_")
    return wrong


def precision_and_errors(folder: str) -> list[str]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    import zeropg

    wrong = []
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        AcceleratorState._reset_state()  # which allows one precision in a process
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        prepared = zeropg.accelerate.prepare(accelerator, *parts(), stage=3)
        seen = train(accelerator, prepared)[1::2]
        output = prepared[0](torch.ones(2, 16))
        dtypes = (output.dtype, prepared[0][2].weight.dtype)
        if dtypes != (torch.float32, dtype) or not seen[-1] < seen[0]:
            wrong.append(f"{precision}: {dtypes} {seen}")
        if precision == "fp16":
            accelerator.save_state(f"{folder}/half")
            accelerator.load_state(f"{folder}/half")
            again = Accelerator(cpu=True, mixed_precision=precision)
            rest = (torch.optim.AdamW(prepared[0].parameters(), lr=1e-2), *parts()[2:])
            prepared = zeropg.accelerate.prepare(again, prepared[0], *rest, stage=3)
            if not math.isfinite(train(again, prepared)[1]) or again.scaler is None:
                wrong.append("a model that is sharded already trains in fp16 without a loss scale")
        accelerator.free_memory()

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    model, *_ = zeropg.accelerate.prepare(accelerator, *parts(), stage=2)
    hook = accelerator.register_save_state_pre_hook(lambda models, weights, directory: None)
    for call, words in (
        (lambda: accelerator.clip_grad_norm_(model[0].parameters(), 1.0), "model.parameters()"),
        (lambda: accelerator.join_uneven_inputs([model]), "even_batches"),
        (lambda: accelerator.save_state(f"{folder}/hooked"), "get_state_dict"),
        (lambda: zeropg.accelerate.prepare(model, stage=3), "expected an accelerate.Accelerator"),
        (lambda: zeropg.accelerate.prepare(accelerator, parts()[2], stage=3), "no model"),
        (lambda: zeropg.accelerate.prepare(accelerator, parts()[0], stages=3), "stages"),
        (lambda: zeropg.accelerate.prepare(accelerator, model, stage=3), "sharded already, with stage=2"),
    ):
        try:
            call()
            wrong.append(f"accepted: {words}")
        except (NotImplementedError, TypeError, ValueError) as error:
            if words not in str(error):
                wrong.append(f"{error} does not say {words}")
    hook.remove()
    return wrong


def two_schedules() -> list[Any]:
    """The gradients of one model overflow in fp16, those of another do not. Returns the learning rates."""
    from accelerate import Accelerator

    import zeropg

    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    (one, first, _, schedule), (other, second, _, follower) = parts(), parts()
    names = (one, other, first, second, schedule, follower)
    one, other, first, second, schedule, follower = zeropg.accelerate.prepare(accelerator, *names, stage=3)
    x = torch.ones(2, 16)
    for model, optimizer, scheduler, scale in ((one, first, schedule, 1e30), (other, second, follower, 1e-3)):
        accelerator.backward(model(x).square().mean() * scale)
        optimizer.step()
        scheduler.step()
    skipped = (first.step_was_skipped, second.step_was_skipped)
    return [skipped, schedule.get_last_lr()[0], follower.get_last_lr()[0]]


def test_each_scheduler_follows_its_own_optimizer() -> None:
    for skipped, first, second in run_ranks(2, two_schedules):
        assert skipped == (True, False)
        assert (first, second) == pytest.approx((1e-2, 1e-2 * 0.95**2))  # accelerate steps once per process


def go_on(folder: str) -> float:
    """The state of two ranks, on one."""
    from accelerate import Accelerator

    import zeropg

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared = zeropg.accelerate.prepare(accelerator, *parts(rate=1.0), stage=0)
    accelerator.load_state(f"{folder}/state3")
    return float(prepared[1].param_groups[0]["lr"])


def test_a_loop_of_accelerate_is_the_one_under_ddp_in_every_stage(tmp_path: Path) -> None:
    assert run_ranks(2, loops, str(tmp_path), timeout=120) == [[], []]
    (rate,) = run_ranks(1, go_on, str(tmp_path))
    assert 0 < rate < 1e-2


def test_mixed_precision_casts_and_what_cannot_work_says_what_to_use(tmp_path: Path) -> None:
    assert run_ranks(2, precision_and_errors, str(tmp_path), timeout=120) == [[], []]
