"""DeepSpeed's Muon: which parameters go by it."""

from __future__ import annotations

import pytest
from torch import nn

from tests.small_gpt import make_model
from zeropg.deepspeed.muon import Muon, tag_hidden_matrices


def test_hidden_matrices_go_by_muon_and_users_may_say_otherwise() -> None:
    model = make_model()
    model.blocks[0].up.weight.use_muon = False
    tag_hidden_matrices(model)
    optimizer = Muon(model.parameters(), muon_lr=0.02, adam_lr=0.003, weight_decay=0.1)
    by_muon, by_adam = optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {n for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n} - {"blocks.0.up.weight"}
    assert {names[id(p)] for p in by_muon["params"]} == expected
    assert len(by_muon["params"]) + len(by_adam["params"]) == len(names)
    assert (by_muon["use_muon"], by_muon["lr"], by_adam["use_muon"], by_adam["lr"]) == (True, 0.02, False, 0.003)
    assert by_adam["adamw_eps"] == 1e-8 and by_adam["weight_decay"] == 0.1


def test_groups_keep_their_options() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = Muon([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].weight}], 0.1)
    assert [(group["lr"], group["use_muon"], len(group["params"])) for group in optimizer.param_groups] == [
        (0.5, True, 1),
        (0.5, False, 1),
        (0.1, True, 1),
    ]
    with pytest.raises(ValueError, match="use_muon=True has parameters of shapes"):
        model[0].bias.use_muon = True
        Muon(model.parameters())
