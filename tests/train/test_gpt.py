"""The model alone: what makes it a language model, before any sharding."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from zeropg.tools.train.gpt import GPT, GPTConfig, rotary_table, rotate

SMALL = GPTConfig(layers=2, width=32, heads=2, context=16)


def test_default_model_has_one_to_three_million_parameters_and_one_embedding_matrix():
    model = GPT(GPTConfig())
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 3e6
    assert model.head.weight is model.embedding.weight


def test_untrained_model_knows_nothing():
    torch.manual_seed(0)
    tokens = torch.randint(256, (4, 17))
    logits = GPT(GPTConfig())(tokens[:, :-1])
    assert logits.shape == (4, 16, 256)
    assert abs(functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) - math.log(256)) < 0.1


def test_a_byte_changes_no_earlier_prediction():
    torch.manual_seed(0)
    model = GPT(SMALL).double()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] += 1
    changed %= 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_rotated_products_depend_on_the_distance_only():
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    table = rotary_table(12, 8, query)
    products = rotate(query.expand(1, 1, 12, 8), table) @ rotate(key.expand(1, 1, 12, 8), table).transpose(-1, -2)
    for distance in range(-11, 12):
        diagonal = products[0, 0].diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-6)
