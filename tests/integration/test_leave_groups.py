"""The end of a program: no thread of gloo's may free a tensor while the interpreter goes away."""

from __future__ import annotations

import time
import weakref
from unittest import mock

import torch
import torch.distributed as dist

from tests.small_gpt import loss_of, make_batches, make_model
from tests.spawn import run_ranks
from zeropg.backend import leave_groups


def train_with_ddp() -> None:
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    loss_of(model, make_batches(1)[0]).backward()


def check_nothing_holds_the_group() -> None:
    train_with_ddp()
    group = weakref.ref(dist.group.WORLD)
    leave_groups()
    assert group() is None


def test_a_group_goes_with_its_models() -> None:
    run_ranks(2, check_nothing_holds_the_group, backend="gloo")


def check_a_group_that_is_held() -> None:
    group = dist.group.WORLD
    with mock.patch.object(time, "sleep") as sleep:
        leave_groups()
    sleep.assert_called_once()
    assert group is not None and not dist.is_initialized()


def test_threads_of_a_group_that_is_held_get_time_to_let_go() -> None:
    run_ranks(2, check_a_group_that_is_held, backend="gloo")
