"""Every program of `programs` in every stage, on every kind of group and in both precisions: the values of the plain
process, or our error on every rank. None is silently wrong, dies with torch's words or hangs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.sharding.ranks import STAGES
from tests.sharding.uses import programs
from tests.sharding.uses.programs import Run
from tests.spawn import THIS_MACHINE, Place, SeparateHosts

GROUPS: dict[str, tuple[str, Place]] = {
    "shared": ("zeropg", THIS_MACHINE),
    "gloo": ("gloo", THIS_MACHINE),
    "two nodes": ("zeropg", SeparateHosts(hosts=(0, 1))),
}
FP64 = (torch.float64, None)
BF16 = (torch.float32, torch.bfloat16)  # with fp32 masters
# Largest difference from the plain process. What a program does to the values is far larger in each.
TOLERANCE = {FP64: 1e-10, BF16: 5e-2}

USES = {
    name: function
    for name, function in vars(programs).items()
    if inspect.isfunction(function) and list(inspect.signature(function).parameters) == ["run"]
}


SHARDED = "values are on several ranks outside of its module's forward"
SHARDED_GRADIENT = "is sharded: each rank holds a part of it"
INSIDE_FULL_GRADIENTS = "called inside full_gradients"
# What is refused: in which stages, and with which words. Everything else equals the plain process.
REFUSED: dict[str, tuple[tuple[int, ...], str]] = {
    "clamp_after_each_step": ((3,), SHARDED),
    "clamp_data_before_each_step": ((3,), SHARDED),
    "clamp_with_foreach": ((3,), SHARDED),
    "clamp_inside_full_parameters": ((3,), "pass writable=True"),
    "assign_data": ((3,), SHARDED),
    "assign_data_between_forward_and_backward": ((3,), "by data that cannot take its place"),
    "assign_data_of_another_dtype": (STAGES, "'head.bias' changed after fully_shard"),
    "initialize_after_sharding": ((3,), SHARDED),
    "load_state_dict_of_a_submodule": ((3,), SHARDED),
    "load_state_dict_of_a_unit": (STAGES, "load_state_dict on a unit"),
    "merge_into_a_frozen_weight": ((3,), SHARDED),
    "renormalized_table_assigned_before_forward": ((3,), SHARDED),
    "renormalized_table_written_in_place_before_forward": ((3,), SHARDED),
    "momentum_teacher": ((3,), SHARDED),
    "momentum_teacher_by_assignment": ((3,), SHARDED),
    "step_inside_writable_shards": (STAGES, "step: called inside zeropg.writable_shards"),
    "write_through_local_shards": (STAGES, "zeropg.writable_shards"),
    "write_on_one_rank": (STAGES, ""),
    "write_differently_inside_full_parameters": (STAGES, "ranks wrote different values to parameter 'head.bias'"),
    "step_without_shard_optimizer": ((2, 3), "is sharded"),
    "keep_grad_over_zero_grad": ((2, 3), SHARDED_GRADIENT),
    "keep_a_view_of_grad": ((2, 3), SHARDED_GRADIENT),
    "drop_one_and_keep_it": ((2, 3), SHARDED_GRADIENT),
    "add_to_grad": ((2, 3), SHARDED_GRADIENT),
    "scale_grad_in_place": ((2, 3), SHARDED_GRADIENT),
    "clip_inside_full_gradients": ((2, 3), INSIDE_FULL_GRADIENTS),
    "step_inside_full_gradients": ((2, 3), INSIDE_FULL_GRADIENTS),
    "zero_inside_full_gradients": ((2, 3), INSIDE_FULL_GRADIENTS),
    "penalty_on_grad": (STAGES, "backward(create_graph=True)"),
    "look_at_gradients_before_they_are_reduced": (STAGES, "have not been reduced"),
    "optimizer_inside_backward": ((2, 3), "is sharded"),
    "error_in_the_second_backward": (STAGES, "an earlier backward raised an error"),
    "read_all_in_a_backward_hook": ((3,), "full_parameters: called inside a backward"),
    "save_in_a_backward_hook": (STAGES, "full_state_dict: called inside a backward"),
    "swap_data_and_back": ((3,), "changed after fully_shard"),
    "transpose_grad_in_place": ((2, 3), SHARDED_GRADIENT),
    "save_after_modules_changed_places": (STAGES, "changed after fully_shard"),
    "parameters_over_one_storage": (STAGES, "share memory but are not one parameter"),
    "a_buffer_over_a_parameter": (STAGES, "share memory but are not one parameter"),
    "replaced_parameter": (STAGES, "'head.bias' changed after fully_shard"),
}


def is_for_soak(group: str, stage: int, precision: tuple[torch.dtype, torch.dtype | None]) -> bool:
    """What others say for it: what bf16 changes, and what a kind of group changes in each stage."""
    if precision == BF16:
        return (group, stage) != ("shared", 3)
    return (group, stage) not in {
        ("shared", 0),
        ("shared", 2),
        ("shared", 3),
        ("gloo", 1),
        ("gloo", 3),
        ("two nodes", 3),
    }


KINDS = [
    pytest.param(
        group,
        stage,
        precision,
        id=f"{group}-{stage}-{name}",
        marks=[pytest.mark.soak] * is_for_soak(group, stage, precision),
    )
    for group in GROUPS
    for stage in STAGES
    for name, precision in (("fp64", FP64), ("bf16", BF16))
]


@pytest.mark.parametrize(("group", "stage", "precision"), KINDS)
def test_equal_to_the_plain_process_or_refused(
    rank_pool: Any, group: str, stage: int, precision: tuple[torch.dtype, torch.dtype | None]
) -> None:
    backend, place = GROUPS[group]
    pool = rank_pool(2, backend, place)
    for rank, found in enumerate(pool.run(outcomes, stage, precision, timeout=240)):
        assert found.keys() == USES.keys()
        for name, outcome in found.items():
            stages, words = REFUSED.get(name, ((), ""))
            if stage in stages:
                assert "[zeropg" in outcome and words in outcome, (rank, name, outcome)
            else:
                assert outcome == "equal", (rank, name, outcome)


# Programs that read or write a parameter between a step and the next forward.
TOO_EARLY = {
    "assign_data",
    "clamp_after_each_step",
    "clamp_with_foreach",
    "load_state_dict_of_a_submodule",
    "merge_into_a_frozen_weight",
    "momentum_teacher",
    "momentum_teacher_by_assignment",
    "renormalized_table_assigned_before_forward",
    "renormalized_table_written_in_place_before_forward",
    "write_on_one_rank",
}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_same_with_steps_that_overlap(rank_pool: Any, stage: int) -> None:
    for rank, found in enumerate(rank_pool(2, "gloo").run(outcomes, stage, FP64, True, timeout=240)):
        early = {name for name, outcome in found.items() if "is on its way" in outcome}
        assert early == TOO_EARLY, rank
        for name, outcome in found.items():
            stages, words = REFUSED.get(name, ((), ""))
            if name not in early and stage in stages:
                assert "[zeropg" in outcome and words in outcome, (rank, name, outcome)
            elif name not in early:
                assert outcome == "equal", (rank, name, outcome)


def outcomes(
    stage: int, precision: tuple[torch.dtype, torch.dtype | None], overlap_step: bool | None = None
) -> dict[str, str]:
    torch.set_num_threads(1)
    return {name: outcome(function, stage, precision, overlap_step) for name, function in USES.items()}


def outcome(
    function: Callable[[Run], None],
    stage: int,
    precision: tuple[torch.dtype, torch.dtype | None],
    overlap_step: bool | None = None,
) -> str:
    """ "equal", or what went wrong."""
    plain = Run(None, precision[0])
    sharded = Run(stage, *precision, overlap_step=overlap_step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(plain)
        try:
            function(sharded)
            values = sharded.values()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    wrong = {
        name: difference
        for name, value in plain.values().items()
        if not (difference := (values[name] - value).abs().max().item()) <= TOLERANCE[precision]
    }
    return f"wrong: {wrong}" if wrong else "equal"
