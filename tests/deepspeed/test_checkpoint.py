"""Checkpoints of an engine: any world size and stage, right after saving, in the middle of an accumulation."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed.training import batches, configuration, make_engine, own_parts, shared_folder, train
from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import loss_of, make_model
from tests.spawn import RankPool

CLIENT_STATE = {"epoch": 3, "best": float("inf"), "order": torch.arange(4), "names": ("a", None)}
FP16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}


def save_and_go_on(folder: str) -> list[float]:
    """Two steps, a checkpoint with half a batch accumulated, and the losses of what follows it."""
    torch.set_num_threads(1)
    engine = make_engine(2, gas=2)
    data = batches()
    train(engine, data[:2])
    half = own_parts(data[2], 2)
    engine.backward(loss_of(engine, half[0]))
    engine.step()
    assert engine.save_checkpoint(folder, client_state=CLIENT_STATE)
    # The accumulated half is still there.
    engine.backward(loss_of(engine, half[1]))
    engine.step()
    assert engine.was_step_applied()
    expected = train(engine, data[3:])
    # Loading right away goes back to the checkpoint; accumulation begins anew.
    path, client_state = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / "global_step2") and engine.global_steps == 2
    assert torch.equal(client_state.pop("order"), CLIENT_STATE["order"])
    assert client_state == {"epoch": 3, "best": float("inf"), "names": ("a", None)}
    assert train(engine, data[2:])[1:] == expected
    return expected


def load_and_go_on(folder: str, stage: int) -> list[float]:
    torch.set_num_threads(1)
    engine = make_engine(stage, gas=1, **({} if dist.get_world_size() != 3 else {"train_batch_size": 15}))
    path, _ = engine.load_checkpoint(folder)
    assert path is not None and engine.global_steps == 2 and engine.global_samples == 32
    rows = engine.train_batch_size()
    return train(engine, batches()[2:, :rows])[1:]


def check_script(folder: Path) -> None:
    """As users of DeepSpeed run it, and where zeropg is not installed."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words, "zero_to_fp32.py", ".", "out"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)

    assert os.access(folder / "zero_to_fp32.py", os.X_OK)
    done = run()
    assert done.returncode == 0, done.stderr
    written = torch.load(folder / "out" / "pytorch_model.bin", weights_only=True)
    assert written.keys() == make_model().state_dict().keys()
    assert all(value.dtype == torch.float32 for value in written.values())
    done = run("-I", "-S")
    assert done.returncode == 1 and "zeropg, which wrote this checkpoint, is not installed for" in done.stderr


def test_what_two_ranks_saved_loads_on_one_and_on_three(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        expected = pool.run(save_and_go_on, str(tmp_path), timeout=120)[0]
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert not list(tmp_path.rglob("*.pt"))
    check_script(tmp_path)
    for world_size, stage, tolerance in ((1, 3, 1e-5), (3, 1, 0.05)):  # three ranks leave a row of each batch out
        with RankPool(world_size) as pool:
            losses = pool.run(load_and_go_on, str(tmp_path), stage, timeout=120)[0]
        assert losses == pytest.approx(expected, rel=tolerance)


@on_ranks(2, timeout=120)
def test_what_is_left_out_stays_as_it_is() -> None:
    from zeropg import deepspeed

    with shared_folder() as folder:

        def make() -> Any:
            made = torch.optim.AdamW((model := make_model()).parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.MultiStepLR(made, [1, 9], gamma=0.5)
            settings = configuration(3, fp16=FP16)
            return deepspeed.initialize(model=model, optimizer=made, lr_scheduler=scheduler, config=settings)[0]

        saved = make()
        train(saved, batches()[:3])
        assert saved.get_lr() == [0.5] and saved.cur_scale > 16
        saved.save_checkpoint(folder, tag="best", save_latest=False)
        with raises(FileNotFoundError, "holds no checkpoint"):
            make().load_checkpoint(folder, tag="worst")
        fresh = make()
        assert fresh.load_checkpoint(folder) == (None, None), "there is no latest"
        assert fresh.load_checkpoint(folder, "best", load_module_only=True)[1] == {}
        assert (fresh.global_steps, fresh.cur_scale, fresh.get_lr()) == (0, 16, [1.0])
        assert same_weights(fresh, saved)
        states = make()
        states.load_checkpoint(folder, "best", load_optimizer_states=False, load_lr_scheduler_states=False)
        assert (states.global_steps, states.cur_scale, states.get_lr()) == (3, saved.cur_scale, [1.0])
        assert not states.optimizer.state
        everything = make()
        everything.load_checkpoint(folder, "best")
        assert everything.get_lr() == [0.5] and everything.lr_scheduler.last_epoch == saved.lr_scheduler.last_epoch
        assert train(everything, batches()[3:]) == train(saved, batches()[3:])


@on_ranks(2)
def test_bad_states_and_tags_are_named() -> None:
    import zeropg

    engine = make_engine(1)
    with shared_folder() as folder:
        with raises(TypeError, "['client_state']['model']", "Linear"):
            engine.save_checkpoint(folder, client_state={"model": nn.Linear(1, 1)})
        with raises(ValueError, "tag is 'rank0' on rank 0, but 'rank1' on rank 1"):
            engine.save_checkpoint(folder, tag=f"rank{dist.get_rank()}")
        with raises(ValueError, "the directory is ''"):
            engine.save_checkpoint("")
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with raises(ValueError, call.__name__, "the tag is ''; expected the name of a folder"):
                call(folder, tag="")
        assert not list(Path(folder).iterdir())
        assert not (Path(folder) / "latest").exists()
        zeropg.save_checkpoint(Path(folder) / "plain", engine.module, engine.optimizer)
        with raises(ValueError, "was saved by zeropg.save_checkpoint, not by an engine"):
            engine.load_checkpoint(folder, tag="plain")


class Adapted(nn.Module):
    """A frozen layer, a trained one, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.adapter = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.adapter.weight
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.adapter(self.base(x)))


@on_ranks(2)
def test_weights_for_others_are_whole_and_as_the_model_computes() -> None:
    from zeropg import deepspeed

    with shared_folder() as shared:
        folder = Path(shared)
        for stage, gathers in ((1, False), (3, True), (3, False)):
            model = Adapted()
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": gathers}
            settings = configuration(stage) | {"zero_optimization": zero, "bf16": {"enabled": True}}
            engine, *_ = deepspeed.initialize(model=model, config=settings)
            is_saved = engine.save_16bit_model(folder / f"{stage}{gathers}", exclude_frozen_parameters=True)
            assert is_saved == (stage < 3 or gathers) and engine.zero_gather_16bit_weights_on_model_save() == gathers
            with raises(ValueError, "save_filename is 'model.safetensors'", "zeropg.save_16bit_weights"):
                engine.save_16bit_model(folder, "model.safetensors")
            if is_saved:
                saved = torch.load(folder / f"{stage}{gathers}" / "pytorch_model.bin", weights_only=True)
                assert sorted(saved) == ["adapter.weight", "tied.weight"]
            assert "base.bias" in engine.module_state_dict()
            assert "base.bias" not in engine.module_state_dict(exclude_frozen_parameters=True)
            if stage < 3:
                with raises(ValueError, "expected 3"):
                    engine._zero3_consolidated_16bit_state_dict()
                continue
            whole = engine._zero3_consolidated_16bit_state_dict()
            assert (whole is None) == (dist.get_rank() > 0)
            if whole is not None:
                assert all(torch.equal(whole[name], value.bfloat16()) for name, value in expected.items())
                assert whole["tied.weight"] is whole["adapter.weight"]


def same_weights(a: Any, b: Any) -> bool:
    import zeropg

    states = [zeropg.full_state_dict(engine.module, rank0_only=False) for engine in (a, b)]
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def make_adapted(stage: int, seed: int = 0, **more: Any) -> Any:
    """An engine over an Adapted; all of its parameters are in the optimizer, frozen ones too."""
    from zeropg import deepspeed

    torch.manual_seed(seed)
    model = Adapted()
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=made, config=configuration(stage, **more))[0]


def adapt(engine: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(engine.module.base.weight.dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    import zeropg

    return zeropg.full_state_dict(engine.module, rank0_only=False)


def load_with_warnings(engine: Any, *arguments: Any, **options: Any) -> str:
    """Loads, and returns what this rank warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load_checkpoint(*arguments, **options)
    return "\n".join(str(one.message) for one in caught)


@on_ranks(2, timeout=120)
def test_frozen_parameters_may_be_left_out() -> None:
    from zeropg.checkpoint.manifest import read_manifest

    with shared_folder() as folder:
        for saving, loading in ((3, 1), (1, 3), (0, 2)):
            saved, tag = make_adapted(saving), str(saving)
            adapt(saved, 2)
            saved.save_checkpoint(folder, tag, exclude_frozen_parameters=True)
            stored = read_manifest(Path(folder, tag))
            assert list(stored.tensors) == ["adapter.weight"] and stored.left_out == ["base.weight", "base.bias"]
            fresh = make_adapted(loading)  # of the same base
            said = load_with_warnings(fresh, folder, tag)
            assert ("holds no base.weight, base.bias; yours stay as they are" in said) == (dist.get_rank() == 0)
            assert same_weights(fresh, saved) and adapt(fresh, 2) == adapt(saved, 2)
            other = make_adapted(loading, seed=5)
            own = weights_of(other)
            other.load_checkpoint(folder, tag)
            assert torch.equal(weights_of(other)["base.weight"], own["base.weight"])
            assert not torch.equal(weights_of(other)["adapter.weight"], own["adapter.weight"])


@on_ranks(2, timeout=120)
def test_names_that_do_not_fit_are_an_error_unless_told() -> None:
    from zeropg import deepspeed

    class Wider(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x)  # type: ignore[no-any-return]

    with shared_folder() as folder:
        saved = make_adapted(2)
        adapt(saved, 2)
        saved.save_checkpoint(folder, "all")
        saved.save_checkpoint(folder, "adapter", exclude_frozen_parameters=True)
        for tag, stage in (("all", 1), ("adapter", 3)):
            torch.manual_seed(7)
            wider, *_ = deepspeed.initialize(model=Wider(), config=configuration(stage))
            head = weights_of(wider)["head.weight"]
            with raises(ValueError, "not in the checkpoint: head.weight, head.bias"):
                wider.load_checkpoint(folder, tag)
            said = load_with_warnings(wider, folder, tag, load_module_strict=False)
            assert ("head.weight" in said) == (dist.get_rank() == 0)
            after = weights_of(wider)
            assert torch.equal(after["head.weight"], head)
            assert torch.equal(after["adapter.weight"], weights_of(saved)["adapter.weight"])
        narrow, *_ = deepspeed.initialize(model=Base(), config=configuration(3))
        with raises(ValueError, "not in the model: adapter.weight"):
            narrow.load_checkpoint(folder, "all")
        narrow.load_checkpoint(folder, "all", load_module_strict=False)
        assert torch.equal(weights_of(narrow)["base.weight"], weights_of(saved)["base.weight"])


@on_ranks(2, timeout=120)
def test_a_function_of_the_program_may_load_the_model() -> None:
    seen: list[Any] = []

    def renamed(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        seen.append({name: value.dtype for name, value in src.items()})
        dst.load_state_dict(src)
        with torch.no_grad():
            dst.base.bias.zero_()

    with shared_folder() as folder:
        saved = make_adapted(1, bf16={"enabled": True})
        adapt(saved, 2)
        saved.save_checkpoint(folder)
        for stage in (0, 3):
            fresh = make_adapted(stage, seed=3, bf16={"enabled": True})
            fresh.load_checkpoint(folder, custom_load_fn=renamed)
            names = ["adapter.weight", "base.bias", "base.weight", "tied.weight"]
            assert seen.pop() == dict.fromkeys(names, torch.float32)
            expected = weights_of(saved) | {"base.bias": torch.zeros(4)}
            assert all(torch.equal(value, expected[name]) for name, value in weights_of(fresh).items()), "masters"
            state = [{s.name: s.tensor.clone() for s in one.optimizer.local_state()} for one in (fresh, saved)]
            assert state[0].keys() == state[1].keys() or stage == 0
            assert fresh.global_steps == 2
            with raises((RuntimeError, KeyError), "nothing fits"):
                fresh.load_checkpoint(folder, custom_load_fn=refuse)
            fresh.load_module_state_dict({"module": weights_of(saved)})
            assert same_weights(fresh, saved)
            fresh.load_module_state_dict({"module": weights_of(saved)}, custom_load_fn=renamed)
            assert not weights_of(fresh)["base.bias"].any()
            seen.clear()
            with raises(RuntimeError, "Missing key", "tied.weight"):
                fresh.load_module_state_dict({"module": {"base.bias": torch.zeros(4)}})


def refuse(src: Any, dst: Any) -> None:
    raise RuntimeError("nothing fits")
