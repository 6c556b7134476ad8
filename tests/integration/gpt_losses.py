"""A small GPT, wrapped as the test says and trained over both backends, has the same losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zeropg.tools.train.gpt import GPT, GPTConfig

Wrap = Callable[[nn.Module, str], nn.Module]  # the model and its backend


def check_losses_are_gloos(wrap: Wrap) -> None:
    """Every rank calls it."""
    ours, gloos = _losses(wrap, "zeropg"), _losses(wrap, "gloo")
    assert ours == pytest.approx(gloos, rel=1e-5), (ours, gloos)
    assert ours[-1] < 0.9 * ours[0], ours


def _losses(wrap: Wrap, backend: str) -> list[float]:
    torch.manual_seed(0)
    model = wrap(GPT(GPTConfig(layers=2, width=32, heads=2, context=32)), backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(dist.get_rank()))
    result = []
    for _ in range(10):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result
