"""Two hosts train and save until one of them vanishes; the other one goes on from the last good checkpoint."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropg
from tests.backend.deadlines import give_seconds
from tests.lab.place import HostsPlace
from tests.lab.test_failures import GROUP_TIMEOUT, MARGIN, Failure, check, join, when_all_train
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import RankPool
from zeropg.tools.lab.lab import Lab

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]
BATCHES = make_batches()


def make(seed: int) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = zeropg.fully_shard(make_model(torch.float64, seed=seed), stage=2)
    return model, zeropg.shard_optimizer(make_optimizer(model), model)


def train(model: Any, optimizer: Any, step: int) -> float:
    """Returns the mean loss of the ranks."""
    batch = BATCHES[step % len(BATCHES)]
    loss = loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_and_save_until_it_fails(folder: Path, is_async: bool) -> Failure:
    """What the loop raised; with `is_async` the time is when the save in the background has ended too."""
    join()
    model, optimizer = make(seed=0)
    losses: list[float] = []
    pending = None
    try:
        for step in count():
            losses.append(train(model, optimizer, step))
            extra = {"losses": losses}
            pending = zeropg.save_checkpoint(folder / "checkpoint", model, optimizer, extra=extra, async_save=is_async)
            if step == 2:
                for group in dist.distributed_c10d._world.pg_map:
                    give_seconds(group, GROUP_TIMEOUT)
            if step == 3:  # nothing that began before is still open
                (folder / f"rank{dist.get_rank()}").touch()
    except Exception as error:
        messages = [str(error)]
        try:
            if pending is not None:
                pending.wait(GROUP_TIMEOUT + MARGIN)
        except Exception as later:
            messages.append(str(later))
        assert all(message.startswith("[zeropg rank") for message in messages), messages
        return Failure("; ".join(messages), time.time())
    raise AssertionError("not reached")


def go_on(folder: Path) -> tuple[list[float], list[float]]:
    """The losses up to the last checkpoint and of three steps more; those of a run that nothing has interrupted."""
    assert os.environ["WORLD_SIZE"] == "2"
    model, optimizer = make(seed=1)
    extra, _ = zeropg.load_checkpoint(folder / "checkpoint", model, optimizer)
    losses = extra["losses"]
    losses += [train(model, optimizer, step) for step in range(len(losses), len(losses) + 3)]
    model, optimizer = make(seed=0)
    return losses, [train(model, optimizer, step) for step in range(len(losses))]


@pytest.mark.parametrize(
    ("how", "is_async"),
    [
        ("dies", True),
        ("is cut off", False),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("dies", False), ("is cut off", True))),
    ],
    ids=lambda value: {True: "in the background", False: "at once"}.get(value, value),
)
def test_training_goes_on_from_the_last_checkpoint_when_a_host(tmp_path: Path, how: str, is_async: bool) -> None:
    with Lab(hosts=2) as lab:
        with RankPool(4, backend=None, place=HostsPlace(lab)) as pool:
            act = {"dies": lab.kill, "is cut off": lab.cut}[how]
            with when_all_train(tmp_path, lambda: act(1)) as vanished:
                dead = [2, 3] if how == "dies" else []
                failures = pool.run(train_and_save_until_it_fails, tmp_path, is_async, timeout=150, expect_death=dead)
            check(failures[:2], ("rank 2", "rank 3", "ranks 2"), vanished[0], GROUP_TIMEOUT + MARGIN)
            if how == "is cut off":
                check(failures[2:], ("rank 0", "rank 1", "ranks 0"), vanished[0], GROUP_TIMEOUT + MARGIN)
        with RankPool(2, place=HostsPlace(lab)) as pool:
            for losses, expected in pool.run(go_on, tmp_path, timeout=90):
                assert len(losses) >= (3 if is_async else 4) + 3  # the fourth save may not have ended
                assert losses == pytest.approx(expected, rel=1e-9)
