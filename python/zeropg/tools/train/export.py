"""Export the trained model, and prove that the file is the model: same loss, from a module that knows no zeropg."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_model
from torch import nn

import zeropg
from zeropg.tools.train.gpt import GPT, GPTConfig
from zeropg.tools.train.loop import Batch, evaluate

# Weights trained in bfloat16 are in the file bit for bit and computed with in the same dtype, on the same batches: the
# losses are equal, but for kernels that choose another order of summation by a buffer's alignment.
_SAME_WEIGHTS_TOLERANCE = 1e-5
# Weights trained in float32 are rounded to 8 bits of mantissa by the export.
_ROUNDED_WEIGHTS_TOLERANCE = 1e-2


def export(model: nn.Module, directory: Path) -> Path:
    """Write the sharded `model` as bfloat16 to `directory`/model.safetensors; every rank calls it."""
    zeropg.save_16bit_weights(model, directory, dtype=torch.bfloat16)
    dist.barrier()  # the file is whole once every rank has written its part
    return directory / "model.safetensors"


def load_plain(file: Path, config: GPTConfig, dtype: torch.dtype, device: torch.device) -> GPT:
    """A new, unsharded GPT with the weights in `file`, to compute in `dtype`."""
    plain = GPT(config).to(device, dtype)
    load_model(plain, file)  # strict: a missing, unknown or misshapen weight raises; tied ones stand in the file once
    return plain


def check_export(plain: nn.Module, validation: list[Batch], sharded_loss: float, trained_dtype: torch.dtype) -> float:
    """The loss of `plain` on the whole validation part; RuntimeError unless it is the sharded model's.

    Each rank evaluates the batches that it evaluated with the sharded model, so the two numbers are sums over the same
    text in the same order. Every rank calls it and gets the same number.
    """
    loss = evaluate(plain, validation)
    tolerance = _SAME_WEIGHTS_TOLERANCE if trained_dtype == torch.bfloat16 else _ROUNDED_WEIGHTS_TOLERANCE
    if not abs(loss - sharded_loss) <= tolerance * sharded_loss:
        raise RuntimeError(
            f"the exported file is not the trained model: its validation loss in a plain torch.nn.Module is {loss:.6f} "
            f"nats/byte, the sharded model's {sharded_loss:.6f}, and at most {tolerance:g} of it was expected between "
            f"them; keep the output directory and report this"
        )
    return loss


@torch.no_grad()
def generate(model: GPT, prompt: str, length: int, *, temperature: float = 0.7, seed: int = 0) -> str:
    """`prompt` and `length` more bytes, each drawn from the model's distribution sharpened by `temperature`."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    for _ in range(length):
        window = torch.tensor([tokens[-model.config.context :]], device=device)
        scores = model(window)[0, -1].float().cpu() / temperature
        tokens.append(int(torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")
