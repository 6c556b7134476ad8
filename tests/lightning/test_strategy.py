"""zeropg.lightning.ZeroPGStrategy on real ranks, beside Lightning's DDP."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.spawn import run_ranks

pytest.importorskip("lightning")

TORCHRUN = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}  # Lightning starts processes itself otherwise


def module(rate: float = 1e-2) -> Any:
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in "ab")
            self.head = nn.Linear(16, 4)
            self.losses: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self(batch[0]).float().square().mean()
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", self(batch[0]).float().square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=rate)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    return Net()


def loader() -> Any:
    data = torch.randn(32, 16, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4)


def trainer(folder: str, strategy: Any, epochs: int = 2, devices: int = 2, **more: Any) -> Any:
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        enable_checkpointing=False,
        **{**quiet, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2, **more},
    )


def fit(folder: str) -> list[str]:
    import zeropg
    from zeropg.lightning import ZeroPGStrategy

    wrong = []
    plain = module()
    with_ddp = trainer(folder, "ddp")
    with_ddp.fit(plain, loader())
    with torch.no_grad():
        expected = float(plain(loader().dataset.tensors[0]).square().mean())
    for stage in range(4):
        net = module()
        with_zero = trainer(folder, ZeroPGStrategy(stage=stage))
        with_zero.fit(net, loader(), loader())
        if not all(math.isclose(a, b, rel_tol=2e-6) for a, b in zip(net.losses, plain.losses, strict=True)):
            wrong.append(f"stage {stage}: {net.losses}, expected {plain.losses}")
        (values,) = with_zero.validate(net, loader(), verbose=False)
        if not math.isclose(values["val"], expected, rel_tol=2e-6):
            wrong.append(f"stage {stage}: validate")
        with_zero.save_checkpoint(f"{folder}/stage{stage}.ckpt")
    half = module()
    trainer(folder, ZeroPGStrategy(stage=3), precision="bf16-mixed", gradient_clip_algorithm="value").fit(
        half, loader()
    )
    if half.head.weight.dtype != torch.bfloat16 or not half.losses[-1] < half.losses[0]:
        wrong.append(f"bf16: {half.losses}")
    try:
        trainer(folder, ZeroPGStrategy(), precision="64-true")
        wrong.append("64-true was accepted")
    except NotImplementedError as error:
        wrong += [] if "bf16-mixed" in str(error) else [str(error)]
    # One epoch more than the checkpoint has, in another stage.
    rest = [module() for _ in range(2)]
    for net, strategy in zip(rest, ("ddp", ZeroPGStrategy(stage=1)), strict=True):
        trainer(folder, strategy, epochs=3).fit(net, loader(), ckpt_path=f"{folder}/stage3.ckpt")
    if not all(math.isclose(a, b, rel_tol=2e-6) for a, b in zip(rest[0].losses, rest[1].losses, strict=True)):
        wrong.append(f"resumed: {rest[0].losses} {rest[1].losses}")
    if len(rest[0].losses) != 4 or isinstance(rest[0], zeropg.FullyShardedModule):
        wrong.append(f"{len(rest[0].losses)} steps in the epoch that was left")
    return wrong


def stepping(steps: str, norm: bool = False) -> Any:
    """A module whose step calls layers by themselves ("layers"), or optimizers by itself ("manual")."""
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.automatic_optimization = steps != "manual"
            self.first = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
            self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
            self.last = nn.Linear(16, 16)
            self.loss = nn.HuberLoss()
            self.losses: list[float] = []
            self.got: set[Any] = set()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.first(x)))

        def training_step(self, batch: Any, index: int) -> Any:
            self.got.add((batch[0].dtype, float(batch[0][0, 0])))
            if not self.automatic_optimization:
                return self.step_each()(batch[0])
            loss = self.loss(self.last(self.norm(self.first(batch[0]))), 2 * batch[0])
            self.losses.append(float(loss.detach()))
            return loss

        def step_each(self) -> Any:
            def step(x: torch.Tensor) -> None:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                    loss = self.loss(self(x), 2 * x)
                    self.manual_backward(loss)
                    optimizer.step()
                    self.losses.append(float(loss.detach()))

            return step

        def configure_optimizers(self) -> Any:
            if self.automatic_optimization:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.first, self.last)]

    return Net()


def averaging(folder: str) -> list[str]:
    """Lightning's own averages of weights are refused, and what unfreezes a part; averages that the error names are
    had. Returns what is wrong."""
    import lightning
    from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging

    import zeropg
    from zeropg.lightning import ZeroPGStrategy

    wrong = []
    refused = ((StochasticWeightAveraging(swa_lrs=1e-2), "zeropg.ema(module)"), (BackboneFinetuning(), "requires_grad"))
    for callback, words in refused:
        net = module()
        net.backbone = nn.Linear(16, 16)  # which BackboneFinetuning asks for
        try:
            trainer(folder, ZeroPGStrategy(), callbacks=[callback]).fit(net, loader())
            wrong.append(f"{type(callback).__name__} was accepted in stage 3")
        except NotImplementedError as error:
            wrong += [] if words in str(error) else [str(error)]

    class Average(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.average, self.losses = zeropg.ema(module, 0.5), []

        def on_train_batch_end(self, *_: Any) -> None:
            self.average.update()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            for weights in (self.average.average_parameters(), contextlib.nullcontext()):
                with weights, torch.no_grad():
                    self.losses.append(float(module(loader().dataset.tensors[0]).square().mean()))

    own = Average()
    trainer(folder, ZeroPGStrategy(), callbacks=[own]).fit(module(), loader())
    wrong += [] if own.losses[0] > own.losses[1] > own.losses[3] else [f"averages behind: {own.losses}"]
    return wrong


def steps(folder: str) -> list[str]:
    """What a step gets and may do, beside DDP. Returns what is wrong."""
    from zeropg.lightning import ZeroPGStrategy

    wrong = []
    data = torch.full((8, 16), 1.001)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=2)
    once = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    for kind, precision, tolerance in (("layers", "bf16-mixed", 2e-2), ("manual", "32-true", 2e-6)):
        plain = stepping(kind)
        trainer(folder, "ddp_find_unused_parameters_true", precision=precision, **once).fit(plain, batches)
        for stage in (2, 3):
            net = stepping(kind)
            trainer(folder, ZeroPGStrategy(stage=stage), precision=precision, **once).fit(net, batches)
            if net.got != plain.got or len(net.got) != 1:
                wrong.append(f"{kind}, stage {stage}: the step gets {net.got}, expected {plain.got}")
            pairs = zip(net.losses, plain.losses, strict=True)
            if not all(math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance / 100) for a, b in pairs):
                wrong.append(f"{kind}, stage {stage}: {net.losses}, expected {plain.losses}")
    wrong += averaging(folder)
    for more, words in (({"sync_batchnorm": True}, "SyncBatchNorm"), ({"precision": "bf16-mixed"}, "buffer_dtype=")):
        try:
            trainer(folder, ZeroPGStrategy(), **once, **more).fit(stepping("layers", norm=True), batches)
            wrong.append(f"{more} was ignored")
        except ValueError as error:
            wrong += [] if words in str(error) else [str(error)]
    net = stepping("layers", norm=True)
    trainer(folder, ZeroPGStrategy(), **once).fit(net, batches)
    try:
        trainer(folder, ZeroPGStrategy(), **once, sync_batchnorm=True).fit(net, batches)
        wrong.append("sync_batchnorm was ignored where the module is sharded already")
    except ValueError as error:
        wrong += [] if "expected a new module" in str(error) else [str(error)]
    for more, stage, words in (({"precision": "bf16-mixed"}, 3, "param_dtype=None"), ({}, 2, "sharded already")):
        try:
            trainer(folder, ZeroPGStrategy(stage=stage), **once, **more).fit(net, batches)
            wrong.append(f"{more} and stage {stage} were ignored where the module is sharded already")
        except ValueError as error:
            wrong += [] if words in str(error) else [str(error)]
    return wrong


def test_steps_get_their_batch_as_it_is_and_may_call_optimizers(tmp_path: Path) -> None:
    assert run_ranks(2, steps, str(tmp_path), env=TORCHRUN, timeout=120) == [[], []]


def alone(folder: str) -> list[float]:
    from zeropg.lightning import ZeroPGStrategy

    net = module(rate=1.0)
    trainer(folder, ZeroPGStrategy(stage=2), epochs=3, devices=1).fit(
        net, loader(), ckpt_path=f"{folder}/stage3.ckpt", weights_only=False
    )
    return net.losses


@pytest.mark.slow
def test_fit_is_the_one_under_ddp_and_checkpoints_load_everywhere(tmp_path: Path) -> None:
    assert run_ranks(2, fit, str(tmp_path), env=TORCHRUN, timeout=120) == [[], []]
    (losses,) = run_ranks(1, alone, str(tmp_path), env=TORCHRUN, timeout=60)
    assert len(losses) == 8 and losses[0] < 0.2
