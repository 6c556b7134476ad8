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
    expected = {n for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n} - {"blocks.0.up.weight"}
    assert {names[id(p)] for p in by_muon["params"]} == expected
    assert len(by_muon["params"]) + len(by_adam["params"]) == len(names)
    assert (by_muon["use_muon"], by_muon["lr"], by_adam["use_muon"], by_adam["lr"]) == (True, 0.02, False, 0.003)
    assert by_adam["weight_decay"] == 0.1


def test_defaults_are_deepspeeds() -> None:
    # deepspeed 0.19.8, runtime/zero/muon: MuonWithAuxAdam.__init__ and muon_update.
    optimizer = Muon(nn.Linear(3, 4).parameters())
    by_muon, by_adam = optimizer.param_groups
    expected = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0, "nesterov": True, "ns_steps": 5, "eps": 1e-7}
    assert {key: by_muon[key] for key in expected} == expected
    assert by_muon["ns_coefficients"] == (3.4445, -4.7750, 2.0315)
    assert by_muon["adjust_lr_fn"] is None  # sqrt(max(1, rows / columns))
    expected = {"lr": 3e-4, "weight_decay": 0}
    assert {key: by_adam[key] for key in expected} == expected
    assert (by_adam["betas"], by_adam["adamw_eps"]) == ((0.9, 0.95), 1e-10)
    assert [group["lr"] for group in Muon(nn.Linear(3, 4).parameters(), lr=0.5, adam_lr=0.1).param_groups] == [0.5, 0.1]


def test_names_decide_and_not_kinds_of_modules() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(5, 4), "Embed": nn.Embedding(5, 4), "lm_head": nn.Linear(4, 5)})
    tag_hidden_matrices(model)
    assert {name: parameter.use_muon for name, parameter in model.named_parameters()} == {
        "wte.weight": True,
        "Embed.weight": False,
        "lm_head.weight": False,
        "lm_head.bias": False,
    }
    filters = nn.Sequential(nn.Conv1d(2, 3, 3))
    with pytest.raises(NotImplementedError, match=r"'0.weight' has shape \[3, 2, 3\]"):
        tag_hidden_matrices(filters)
    filters[0].weight.use_muon = False
    tag_hidden_matrices(filters)
    assert not filters[0].weight.use_muon


def test_groups_keep_their_options() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = Muon([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].weight}], 0.1)
    assert [(group["lr"], group["use_muon"], len(group["params"])) for group in optimizer.param_groups] == [
        (0.5, True, 1),
        (0.5, False, 1),
        (0.1, True, 1),
    ]
    group = {"params": model[0].parameters(), "eps": 1e-3}
    assert [(group["eps"], group["adamw_eps"]) for group in Muon([group]).param_groups] == [(1e-7, 1e-3)] * 2
    with pytest.raises(ValueError, match="use_muon=True has parameters of shapes"):
        model[0].bias.use_muon = True
        Muon(model.parameters())
