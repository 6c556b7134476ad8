"""Learning-rate schedules beside the rates that DeepSpeed 0.19.8's own classes gave at the same steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeropg.deepspeed.schedules import SCHEDULES, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

STEPS = (0, 1, 2, 5, 6, 10, 13, 16, 20)  # before the first step() is 0
# fmt: off
RATES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("LRRangeTest", {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 0.5},
     [0.001, 0.0011250000000000001, 0.00125, 0.0016250000000000001, 0.00175, 0.0022500000000000003, 0.002625,
      0.003, 0.0035]),
    ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_staircase": True},
     [0.001, 0.001, 0.001, 0.002, 0.002, 0.003, 0.004, 0.005, 0.006]),
    ("OneCycle", {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.01, "cycle_first_step_size": 5, "cycle_second_step_size": 8,
                  "decay_lr_rate": 0.1, "decay_step_size": 4},
     [0.0001, 0.0020799999999999985, 0.004059999999999998, 0.009999999999999998, 0.008762499999999998,
      0.0038125000000000012, 0.0001, 9.30232558139535e-05, 8.510638297872341e-05]),
    ("OneCycle", {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.01, "cycle_first_step_size": 6,
                  "cycle_first_stair_count": 3, "decay_mom_rate": 0.01, "decay_step_size": 2},
     [0.0001, 0.0001, 0.0034, 0.0067, 0.01, 0.0034, 0.0001, 0.0001, 0.0001]),
    ("WarmupLR", {"warmup_num_steps": 10},
     [0.0, 0.0, 0.00030102999566398113, 0.0006989700043360187, 0.0007781512503836435, 0.0009999999999999998, 0.001,
      0.001, 0.001]),
    ("WarmupLR", {"warmup_min_lr": 1e-05, "warmup_max_lr": 0.002, "warmup_num_steps": 10, "warmup_type": "linear"},
     [1e-05, 1e-05, 0.000209, 0.0008060000000000001, 0.001005, 0.001801, 0.002, 0.002, 0.002]),
    ("WarmupDecayLR", {"total_num_steps": 18, "warmup_num_steps": 6},
     [0.0, 0.0, 0.0003868528072345415, 0.000898244401703927, 0.0009999999999999998, 0.00075, 0.0005, 0.00025, 0.0]),
    ("WarmupDecayLR", {"total_num_steps": 18, "warmup_num_steps": 6, "warmup_type": "linear", "warmup_max_lr": 0.0005},
     [0.0, 0.0, 8.333333333333333e-05, 0.0003333333333333333, 0.0004166666666666667, 0.000375, 0.00025, 0.000125, 0.0]),
    ("WarmupCosineLR", {"total_num_steps": 18, "warmup_num_steps": 6, "warmup_min_ratio": 0.1},
     [0.0, 0.0001, 0.0004481675265110874, 0.0009084199615335344, 0.0009999999999999998, 0.000750025,
      0.0003706534184009947, 6.708059937796987e-05, 1.0000000000000001e-07]),
    ("WarmupCosineLR", {"total_num_steps": 18, "warmup_num_steps": 6, "warmup_type": "linear", "cos_min_ratio": 0.05},
     [0.0, 0.0, 0.00016666666666666666, 0.0006666666666666666, 0.0008333333333333334, 0.0007624999999999999,
      0.0004020609535763026, 0.00011363793320239162, 5e-05]),
]
# fmt: on
ONE_CYCLE = {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.01}


def adam(*rates: float) -> torch.optim.Adam:
    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates])


@pytest.mark.parametrize(("name", "params", "expected"), RATES, ids=[name for name, *_ in RATES])
def test_rates_are_deepspeeds_at_every_step(name: str, params: dict[str, Any], expected: list[float]) -> None:
    optimizer = adam(1e-3)
    schedule = SCHEDULES[name](optimizer, **params)
    found = []
    for _ in range(STEPS[-1] + 1):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert [found[step] for step in STEPS] == pytest.approx(expected, rel=1e-14, abs=0)


def test_one_cycle_moves_the_betas_against_the_rate() -> None:
    optimizer = adam(1e-3)
    schedule = OneCycle(optimizer, 1e-4, 1e-2, cycle_first_step_size=5, cycle_second_step_size=8)
    momenta = []
    for _ in range(STEPS[-1] + 1):
        momenta.append(optimizer.param_groups[0]["betas"])
        schedule.step()
    expected = [0.8, 0.88, 0.8600000000000001, 0.8, 0.8125000000000001, 0.8625, 0.9, 0.9, 0.9]
    assert [momenta[step] for step in STEPS] == [(pytest.approx(momentum, rel=1e-14), 0.99) for momentum in expected]
    with pytest.warns(UserWarning, match="SGD has no betas"):
        OneCycle(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]), 1e-4, 1e-2)


def test_a_schedule_goes_on_from_a_state_dict() -> None:
    whole, parts = adam(1e-3, 5e-3), adam(1e-3, 5e-3)
    schedule = WarmupLR(whole, warmup_num_steps=8)
    for _ in range(9):
        schedule.step()
    assert schedule.state_dict() == {"last_batch_iteration": 8}
    resumed = WarmupLR(parts, warmup_num_steps=8)
    resumed.load_state_dict({"last_batch_iteration": 4})
    for _ in range(4):
        resumed.step()
    assert [group["lr"] for group in parts.param_groups] == [1e-3, 5e-3]
    assert resumed.get_last_lr() == schedule.get_last_lr()


def test_rates_may_be_tensors() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(1e-3), foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    WarmupCosineLR(optimizer, 10, warmup_num_steps=2).step(5)
    assert optimizer.param_groups[0]["lr"] is rate and 0 < rate.item() < 1e-3


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup_num_steps is 0; expected a whole number, at least 1"):
        WarmupLR(adam(1e-3), warmup_num_steps=0)
    with pytest.raises(ValueError, match=r"warmup_type is 'cubic'; expected 'log' or 'linear'"):
        WarmupLR(adam(1e-3), warmup_type="cubic")
    with pytest.raises(ValueError, match=r"warmup_max_lr has 3 numbers; expected one, or 2"):
        WarmupLR(adam(1e-3, 1e-4), warmup_max_lr=[1, 2, 3])
    with pytest.raises(ValueError, match=r"cycle_first_step_size is 0"):
        OneCycle(adam(1e-3), 1e-4, 1e-2, cycle_first_step_size=0)
    growing = OneCycle(adam(1e-3), 1e-4, 1e-2, cycle_first_step_size=1, decay_step_size=1, decay_mom_rate=0.06)
    with pytest.raises(ValueError, match=r"at iteration 3 decay_mom_rate=0.06 lets the first beta be 1.00"):
        for _ in range(5):
            growing.step()
    with pytest.warns(UserWarning, match="the run ends during the warm-up"):
        WarmupDecayLR(adam(1e-3), 10, warmup_num_steps=20)


@pytest.mark.parametrize(("name", "params"), [("WarmupLR", {"warmup_num_steps": 4}), ("OneCycle", ONE_CYCLE)])
def test_a_group_added_later_keeps_its_rate(name: str, params: dict[str, Any]) -> None:
    optimizer = adam(1e-3)
    schedule = SCHEDULES[name](optimizer, **params)
    before = optimizer.param_groups[0]["lr"]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.5})
    schedule.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] > before and optimizer.param_groups[1]["lr"] == 0.5
