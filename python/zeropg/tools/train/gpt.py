"""A small GPT: the plain torch.nn.Module that `python -m zeropg train` trains.

Nothing here knows about ranks, shards or zeropg. The same class is trained under every stage, and built anew,
unsharded, to check the exported file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # one token per byte


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT: `layers` blocks of `width` channels and `heads` heads, over at most `context` bytes."""

    layers: int = 4
    width: int = 192
    heads: int = 4
    context: int = 256


class Attention(nn.Module):
    """Causal self-attention over `[batch, length, width]`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = x.shape
        # [batch, length, 3, heads, head_width] -> three tensors of [batch, heads, length, head_width]
        query, key, value = self.query_key_value(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, rotation), rotate(key, rotation), value, is_causal=True
        )
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class Block(nn.Module):
    """Attention, then a perceptron, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.perceptron_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.output = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        x = x + self.output(functional.gelu(self.expand(self.perceptron_norm(x)), approximate="tanh"))
        return x


class GPT(nn.Module):
    """GPT-2 over bytes, with rotary positions, and one matrix for the embedding and the head.

    `blocks` is an nn.ModuleList of equal children: `zeropg.fully_shard` makes each of them a unit of its own.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(_initialise)
        # GPT-2, section 2.3: the residual stream sums 2 * layers outputs, so each starts smaller by the square root.
        for name, parameter in self.named_parameters():
            if name.endswith("output.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, length, 256]` of the byte after each of `tokens` (`[batch, length]`, int64)."""
        x = self.embedding(tokens)
        rotation = rotary_table(tokens.shape[1], self.config.width // self.config.heads, x)
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotary_table(length: int, head_width: int, like: Tensor) -> Tensor:
    """Cosines and sines `[2, length, head_width / 2]` of RoFormer (arXiv:2104.09864), dtype and device of `like`.

    Made anew in each forward: as a buffer, `.to(torch.bfloat16)` would round the angles and not only their cosines.
    Learned positions, as in GPT-2, learn too slowly for a short run: after 500,000 bytes a loss of 2.30 and not 1.72.
    """
    frequencies = 10000 ** (-torch.arange(0, head_width, 2, device=like.device) / head_width)
    angles = torch.arange(length, device=like.device)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of channels of `x` (`[batch, heads, length, head_width]`) by its position's angle."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
