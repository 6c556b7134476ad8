"""Two ranks, one all-reduce: does it really work here?"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from zeropg.tools.doctor.finding import Finding

RANKS = 2
_SECONDS = 60
_NUMEL = 100_003  # odd, so that tails are part of it


def check() -> Finding:
    """Starts two processes that sum a tensor over a zeropg group, through a store in a file; ends them in any case."""
    with tempfile.TemporaryDirectory(prefix="zeropg-doctor-") as folder:
        start = time.monotonic()
        outputs = [Path(folder) / f"rank{rank}.txt" for rank in range(RANKS)]
        processes = []
        for rank, output in enumerate(outputs):
            command = [
                sys.executable,
                "-m",
                "zeropg",
                "doctor",
                "--self-test-rank",
                str(rank),
                "--store",
                f"{folder}/store",
            ]
            with output.open("w") as file:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        try:
            for process in processes:
                process.wait(max(0.1, start + _SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                process.kill()
                process.wait()
        seconds = time.monotonic() - start
        failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
        if not failed:
            return Finding("self-test", "ok", f"{RANKS} ranks summed {_NUMEL:,} numbers; {seconds:.1f} s with start-up")
        lines = outputs[failed[0]].read_text(errors="replace").strip().splitlines()
        return Finding(
            "self-test",
            "no",
            f"rank {failed[0]} of {RANKS}: {lines[-1] if lines else f'silent for {_SECONDS} s'}",
            "the lines above marked no are the likely reason; TORCH_DISTRIBUTED_DEBUG=DETAIL says more",
        )


def run_rank(rank: int, store: str) -> int:
    """One of the two ranks."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    import zeropg  # noqa: F401  (registers the backend where the package is not installed)

    limit = timedelta(seconds=_SECONDS / 2)
    files = FileStore(store, RANKS)
    dist.init_process_group("zeropg", store=files, rank=rank, world_size=RANKS, timeout=limit)
    tensor = torch.arange(_NUMEL, dtype=torch.float32) + rank
    dist.all_reduce(tensor)
    expected = RANKS * torch.arange(_NUMEL, dtype=torch.float32) + sum(range(RANKS))
    wrong = int((tensor != expected).sum())
    dist.destroy_process_group()
    if wrong:
        print(f"{wrong} of {_NUMEL} sums are wrong")
    return int(wrong > 0)
