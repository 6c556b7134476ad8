"""What the user can set for `python -m zeropg train`, and which combinations make sense."""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from zeropg.compression.codec import Codec, named_codecs
from zeropg.tools.command_line import make_parser
from zeropg.tools.train.gpt import GPTConfig

PARAM_DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}

_DESCRIPTION = """\
Trains a byte-level GPT on the language reference that ships with every CPython (pydoc_data.topics). The model is
sharded by zeropg.fully_shard. At the end you get a memory table, model.safetensors in bfloat16, a check that this file
gives the same validation loss in a plain torch.nn.Module, and a sample of generated text.

Without torchrun it is one process; under torchrun each rank takes its part of the batch. The text that a step reads
does not depend on the number of ranks."""

_EXAMPLES = """\
examples:
  python -m zeropg train --steps 20                              one process, a first look
  torchrun --standalone --nproc-per-node 2 -m zeropg train       the whole run: ZeRO-3 on two processes
  torchrun --standalone --nproc-per-node 2 -m zeropg train --stage 2 --param-dtype fp32
  torchrun --standalone --nproc-per-node 4 -m zeropg train --backend gloo --batch 16 --output runs/gloo
  torchrun --standalone --nproc-per-node 2 -m zeropg train --compression top_k     gradients in few bytes
  torchrun --standalone --nproc-per-node 2 -m zeropg train --checkpoint-every 100
  torchrun --standalone --nproc-per-node 4 -m zeropg train --checkpoint-every 100 --resume --stage 1

The last two lines belong together: the second goes on from the first's checkpoint, on more ranks and in another stage.

status: 0 trained and exported; 1 a rank failed; 2 wrong options; 130 interrupted
"""


@dataclass(frozen=True)
class Options:
    """The settings of one run, as parsed; `parse` fills in every field."""

    stage: int
    backend: str
    device: str
    param_dtype: torch.dtype
    compression: Codec | Literal["auto"] | None
    steps: int
    batch: int
    lr: float
    seed: int
    model: GPTConfig
    threads: int
    output: Path
    checkpoint_every: int | None
    resume: bool
    json: bool

    @property
    def checkpoint(self) -> Path:
        return self.output / "checkpoint"


def parse(arguments: list[str], *, rank: int, world_size: int, local_world_size: int) -> Options:
    """Read the command line; on a mistake, exit with status 2 after rank 0 has printed what is wrong."""
    with contextlib.ExitStack() as stack:
        if rank != 0:
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        parser = _parser()
        values = parser.parse_args(arguments)
        mistake = _mistake(values, world_size)
        if mistake is not None:
            parser.error(mistake)
    usable = len(os.sched_getaffinity(0))
    return Options(
        stage=values.stage,
        backend=values.backend,
        device=values.device,
        param_dtype=PARAM_DTYPES[values.param_dtype],
        compression="auto" if values.compression == "auto" else named_codecs().get(values.compression),
        steps=values.steps,
        batch=values.batch,
        lr=values.lr,
        seed=values.seed,
        model=GPTConfig(layers=values.layers, width=values.width, heads=values.heads, context=values.context),
        threads=values.threads or max(1, min(4, usable // local_world_size)),
        output=values.output,
        checkpoint_every=values.checkpoint_every,
        resume=values.resume,
        json=values.json,
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("train", _DESCRIPTION, _EXAMPLES)
    sharding = parser.add_argument_group("sharding")
    sharding.add_argument(
        "--stage",
        type=int,
        choices=range(4),
        default=3,
        help="what is sharded: 0 nothing, 1 the optimizer, 2 also gradients, 3 also parameters (default 3)",
    )
    sharding.add_argument(
        "--backend", choices=("zeropg", "gloo"), default="zeropg", help="process group (default zeropg)"
    )
    sharding.add_argument(
        "--param-dtype",
        choices=tuple(PARAM_DTYPES),
        default="bf16" if _has_fast_bfloat16() else "fp32",
        help="dtype of weights and activations; bf16 has fp32 masters beside it (default here: %(default)s)",
    )
    sharding.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the model computes (default cpu)"
    )
    sharding.add_argument(
        "--compression",
        choices=("none", "auto", *named_codecs()),
        default="none",
        help="codec of gradients between ranks, or between nodes where there are several; auto measures what pays "
        "(default none)",
    )
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=_positive, default=560, help="optimizer steps (default 560)")
    training.add_argument(
        "--batch", type=_positive, default=8, help="windows of text per step, over all ranks (default 8)"
    )
    training.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (default 0.003)")
    training.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and the order of the data (default 0)"
    )
    training.add_argument(
        "--threads", type=_positive, help="threads per rank (default: usable CPUs / ranks here, at most 4)"
    )
    model = parser.add_argument_group("model")
    shape = GPTConfig()
    model.add_argument("--layers", type=_positive, default=shape.layers, help=f"blocks (default {shape.layers})")
    model.add_argument("--width", type=_positive, default=shape.width, help=f"channels (default {shape.width})")
    model.add_argument("--heads", type=_positive, default=shape.heads, help=f"attention heads (default {shape.heads})")
    model.add_argument(
        "--context", type=_positive, default=shape.context, help=f"bytes of text in a window (default {shape.context})"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, default=Path("runs/train"), help="directory for all results (default runs/train)"
    )
    output.add_argument(
        "--checkpoint-every",
        type=_positive,
        metavar="STEPS",
        help="save to OUTPUT/checkpoint every STEPS steps (default: never)",
    )
    output.add_argument(
        "--resume", action="store_true", help="go on from OUTPUT/checkpoint, at any number of ranks and in any stage"
    )
    output.add_argument(
        "--json", action="store_true", help="print the figures as JSON on stdout and everything else on stderr"
    )
    return parser


def _has_fast_bfloat16() -> bool:
    # Without the instructions (AVX-512 on x86), ATen multiplies bfloat16 matrices seven times slower than float32 ones.
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _mistake(values: argparse.Namespace, world_size: int) -> str | None:
    if values.batch % world_size != 0:
        below = values.batch - values.batch % world_size
        return (
            f"--batch {values.batch} does not divide by {world_size} ranks; "
            f"take {' or '.join(str(n) for n in (below, below + world_size) if n > 0)}"
        )
    if values.width % values.heads != 0:
        return f"--width {values.width} does not divide by --heads {values.heads}"
    if values.width // values.heads % 2 != 0:
        return f"--width {values.width} / --heads {values.heads} is odd; rotary positions turn pairs of channels"
    if not values.lr > 0:
        return f"--lr {values.lr} is not positive"
    if values.device == "cuda" and values.backend == "gloo":
        return "--device cuda needs --backend zeropg: gloo would copy every shard through the host"
    if values.compression != "none" and (values.backend, values.device) != ("zeropg", "cpu"):
        return (
            f"--compression {values.compression} needs --backend zeropg and --device cpu: only zeropg's collectives "
            "carry codecs, and they encode on the CPU"
        )
    if values.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch finds no CUDA device here; take --device cpu"
    if values.resume and not (values.output / "checkpoint").is_dir():
        return f"--resume: there is no {values.output / 'checkpoint'}; a run with --checkpoint-every writes it"
    return _unwritable(values.output)


def _unwritable(directory: Path) -> str | None:
    # Found before the training, not after it, and by every rank for itself.
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--output {directory}: {error.strerror}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"--output {directory}: no permission to write there"
    return None
