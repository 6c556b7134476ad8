"""What one rank does: the jobs of a file in turn, each with a group of its own. Rank 0 writes what each gave."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from zeropg.backend import leave_groups
from zeropg.compression.state import backend_of
from zeropg.tools.bench.hosts import sent_bytes
from zeropg.tools.bench.loss.arms import ARMS, Setup, Trainer
from zeropg.tools.bench.loss.journal import Journal, Place
from zeropg.tools.bench.loss.outcome import Job, Outcome
from zeropg.tools.bench.loss.tasks import TASKS
from zeropg.tools.train.loop import learning_rate_factor

_WARM_UP = 3  # steps before steps are timed: buckets and buffers are made in them


def run_jobs(jobs: list[Job], place: Place, journal: Journal) -> None:
    """Every rank of a lab calls it, with torchrun's variables. Rank 0 appends to `journal` what each job gave."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # of what is not measured
    for number, job in enumerate(jobs):
        if dist.get_rank() == 0:
            print(f"[{number + 1}/{len(jobs)}] {job}", flush=True)
        outcome = _run(job)
        if dist.get_rank() == 0:
            journal.append(place, job, outcome)
    leave_groups()


def _run(job: Job) -> Outcome:
    arm = ARMS[job.arm]
    group = dist.new_group(backend=arm.backend)
    task = TASKS[job.task](job.seed, dist.get_rank(), dist.get_world_size())
    torch.manual_seed(job.seed)
    model = task.model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    warm_up_steps = arm.warm_up_steps(0 if job.timed else job.steps)
    trainer = arm.make(Setup(task, model, group, task.lr * job.lr_factor, warm_up_steps))
    outcome = Outcome(parameters=parameters)
    base = [each["lr"] for each in trainer.optimizer.param_groups]
    first = warm_up_steps + _WARM_UP if job.timed else 0
    meter = _Meter(trainer)
    for step in range(first + job.steps):
        if step == first:
            meter.start()
        begin = time.perf_counter()
        for each, lr in zip(trainer.optimizer.param_groups, base, strict=True):
            each["lr"] = lr * learning_rate_factor(step, first + job.steps)
        task.loss(trainer.model, step).backward()
        trainer.clip()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        if step >= first:
            outcome.step_seconds.append(time.perf_counter() - begin)
        done = step + 1 - first
        if job.validate_every and (done % job.validate_every == 0 or done == job.steps):
            meter.pause()
            loss, outcome.accuracy_percent = task.evaluate(trainer.model)
            outcome.curve.append((done, loss))
            meter.start()
    meter.pause()
    _sum_up(outcome, meter, job.steps)
    trainer.close()
    dist.destroy_process_group(group)
    return outcome


def _sum_up(outcome: Outcome, meter: _Meter, steps: int) -> None:
    """Brings the ranks' figures together."""
    slowest = torch.tensor(outcome.step_seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    outcome.step_seconds = slowest.tolist()
    total = torch.tensor(meter.spent, dtype=torch.float64)
    dist.all_reduce(total)
    sent, encode, decode, collectives = (total / steps).tolist()
    ranks = dist.get_world_size()
    outcome.bytes_per_step = sent
    outcome.encode_seconds, outcome.decode_seconds = encode / ranks, decode / ranks
    outcome.wire_seconds = max(0.0, collectives - encode - decode) / ranks


class _Meter:
    """Bytes that this host has sent (asked by its first rank), and seconds of codecs and collectives, in the steps."""

    def __init__(self, trainer: Trainer) -> None:
        self._coding = trainer.coding
        self.spent = [0.0] * 4
        self._running = False
        self._before = self.spent

    def start(self) -> None:
        dist.barrier()
        self._before = self._now()
        self._running = True

    def pause(self) -> None:
        if self._running:
            dist.barrier()
            self.spent = [s + n - b for s, n, b in zip(self.spent, self._now(), self._before, strict=True)]
            self._running = False

    def _now(self) -> list[float]:
        counters: Any = {} if self._coding is None else self._coding.meter.counters()
        coding = [counters.get(name, 0.0) for name in ("encode_seconds", "decode_seconds")]
        sent = sent_bytes() if os.environ["LOCAL_RANK"] == "0" else 0.0
        return [sent, *coding, _collective_seconds()]


def _collective_seconds() -> float:
    """In which collectives of this process's zeropg groups have run so far."""
    backends = {id(backend): backend for group in dist.distributed_c10d._world.pg_map for backend in _zeropg_of(group)}
    return math.fsum(counted["seconds"] for backend in backends.values() for counted in backend.stats().values())


def _zeropg_of(group: dist.ProcessGroup) -> list[Any]:
    try:
        return [backend_of(group, "bench loss")]
    except ValueError:
        return []
