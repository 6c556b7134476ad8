"""What a user of DeepSpeed has: a small GPT-2 that learns real text. One line chooses the package, `import_module`.

`bench deepspeed` starts it by torchrun, in turn with PACKAGE deepspeed and zeropg.deepspeed:

    python -m zeropg.tools.bench.deepspeed.script PACKAGE JOB.json RESULT.json

The job holds DeepSpeed's "config", "layers", "width", "context" and "steps", and "warm_up": updates that come before
them. Rank 0 writes the losses (the ranks' mean, of every update) and loss scales, the median seconds of an update (of
the slowest rank, without those that warm up), and the peak of memory (of the largest rank).
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeropg.tools.bench.peak_memory import PeakMemory
from zeropg.tools.train.memory import resident_bytes
from zeropg.tools.train.text import TrainingBatches, load_text


def main(package: str, job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    config, warm_up = job["config"], int(job["warm_up"])
    torch.set_num_threads(1)
    from transformers import GPT2Config, GPT2LMHeadModel

    deepspeed = importlib.import_module(package)
    deepspeed.init_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro_batch, accumulation = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    batches = TrainingBatches(
        load_text().training,
        context=job["context"],
        batch=micro_batch * world_size,
        seed=1,
        rank=rank,
        world_size=world_size,
    )
    before = resident_bytes()
    with PeakMemory() as peak:
        torch.manual_seed(0)
        shape = GPT2Config(
            vocab_size=256,
            n_layer=job["layers"],
            n_embd=job["width"],
            n_head=job["width"] // 64,
            n_positions=job["context"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        model = GPT2LMHeadModel(shape)
        parameters = sum(p.numel() for p in model.parameters())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        run = Run(engine, batches, accumulation)
        for update in range(warm_up):
            run.update(update)
    run.seconds.clear()
    for update in range(warm_up, warm_up + job["steps"]):
        run.update(update)

    largest = torch.tensor([statistics.median(run.seconds), float(peak.bytes - before), float(peak.bytes)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if rank == 0:
        step_s, memory, process = largest.tolist()
        result = {"parameters": parameters, "step_s": step_s, "memory_bytes": memory, "process_bytes": process}
        Path(result_file).write_text(json.dumps(result | {"losses": run.losses, "loss_scales": run.loss_scales}))
    dist.barrier()
    dist.destroy_process_group()


class Run:
    """Updates of an engine, each over `accumulation` micro-batches, and what they gave."""

    def __init__(self, engine: Any, batches: TrainingBatches, accumulation: int) -> None:
        self.losses: list[float] = []
        self.loss_scales: list[float] = []
        self.seconds: list[float] = []
        self._engine = engine
        self._batches = batches
        self._accumulation = accumulation

    def update(self, number: int) -> None:
        rows = [self._batches.at(number * self._accumulation + each) for each in range(self._accumulation)]
        loss_sum = torch.zeros(())
        start = time.perf_counter()
        for inputs, targets in rows:
            logits = self._engine(input_ids=inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            self._engine.backward(loss)
            self._engine.step()
            loss_sum += loss.detach()
        self.seconds.append(time.perf_counter() - start)
        dist.all_reduce(loss_sum)
        self.losses.append(loss_sum.item() / dist.get_world_size() / self._accumulation)
        self.loss_scales.append(float(getattr(self._engine.optimizer, "cur_scale", 1.0)))


if __name__ == "__main__":
    main(*sys.argv[1:])
