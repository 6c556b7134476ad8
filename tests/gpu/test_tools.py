"""The commands on a machine with a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from tests.gpu.gpu import needs_gpu, showed

pytestmark = needs_gpu


def test_doctor_names_the_gpu_and_nccl() -> None:
    command = [sys.executable, "-m", "zeropg", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {entry["topic"]: entry for entry in json.loads(done.stdout)["findings"]}
    assert findings["GPU"]["state"] == "ok" and torch.cuda.get_device_name(0) in " ".join(
        entry["detail"] for entry in json.loads(done.stdout)["findings"] if entry["topic"] == "GPU"
    )
    assert findings["NCCL"]["state"] == "ok"
    showed(f"{findings['GPU']['detail']}; NCCL {findings['NCCL']['detail']}")


def test_the_main_job_trains_exports_and_checks_on_a_gpu(tmp_path: Path) -> None:
    size = ["--steps", "40", "--layers", "2", "--width", "64", "--heads", "2", "--context", "64", "--batch", "8"]
    command = [sys.executable, "-m", "zeropg", "train", "--device", "cuda", *size, "--json", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    losses = [loss for _, loss in results["validation_curve"]]
    assert losses[-1] < losses[0]
    showed(f"validation loss {losses[0]:.3f} -> {losses[-1]:.3f}, {results['tokens_per_second']:,.0f} tokens/s")
