"""The figures of a run, as a dictionary, and its loss curve."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeropg.tools.train.loop import History
from zeropg.tools.train.options import Options


def figures(options: Options, history: History) -> dict[str, Any]:
    """The settings and what the training measured, ready for JSON."""
    loss = history.validation[-1][1]
    return {
        "stage": options.stage,
        "backend": options.backend,
        "device": options.device,
        "param_dtype": str(options.param_dtype).removeprefix("torch."),
        "world_size": dist.get_world_size(),
        "torch": torch.__version__,
        "model": vars(options.model),
        "compression": None if options.compression is None else str(options.compression),
        "steps": options.steps,
        "batch": options.batch,
        "lr": options.lr,
        "seed": options.seed,
        "validation_loss_nats_per_byte": loss,
        "validation_loss_bits_per_byte": loss / math.log(2),
        "training_seconds": history.seconds,
        "tokens_per_second": history.tokens / history.seconds,
        "communication_share": history.communication_seconds / history.seconds,
        "peak_process_bytes": history.peak_process_bytes,
        "training_curve": history.training,
        "validation_curve": history.validation,
    }


def plot_losses(history: History, file: Path) -> None:
    """Draw both loss curves to `file` (PNG), if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    axes.plot(*zip(*history.training, strict=True), label="training", linewidth=1)
    axes.plot(*zip(*history.validation, strict=True), label="validation", marker="o")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
