"""A small GPT and its training in plain torch: the truth that sharded training is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 61
CONTEXT = 16
GLOBAL_BATCH = 12
STEPS = 30
LEARNING_RATE = 4e-3


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        # No bias: softmax does not see a key's bias, so its gradient is rounding noise, which Adam scales up to a step.
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.attention(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class SmallGPT(nn.Module):
    """Tied embedding and head, a buffer, sizes that leave odd tails in every flat buffer."""

    positions: torch.Tensor

    def __init__(self, width: int = 36, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(CONTEXT), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.place(self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> SmallGPT:
    """The same weights in every dtype and on every rank."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = SmallGPT().to(dtype)
    torch.set_rng_state(generator_state)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Weight decay on matrices only, so that flat buffers are cut into several parameter groups."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def make_batches(steps: int = STEPS) -> torch.Tensor:
    """[steps, GLOBAL_BATCH, CONTEXT + 1]: a sequence that can be learnt, different in every row."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(VOCABULARY, (steps, GLOBAL_BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (steps, GLOBAL_BATCH, 1), generator=generator)
    return (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train_plain(
    dtype: torch.dtype, parts: int = 1, clip: float | None = 1.0
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of every step and the final parameters of one plain process, the batch in `parts` equal micro-batches."""
    model = make_model(dtype)
    optimizer = make_optimizer(model)
    losses = []
    for batch in make_batches():
        total = 0.0
        for part in batch.chunk(parts):
            loss = loss_of(model, part) / parts
            loss.backward()
            total += loss.item()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}
