"""README's Python runs as printed, on two ranks, and some commands for a new user. (Its C++: tests/cpp_program.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zeropg  # registers the backend, also where the package is not installed
from tests.commands import AGENT_STORE
from tests.spawn import run_ranks
from tests.test_cpp import ROOT
from zeropg.__main__ import COMMANDS
from zeropg.tools.bench.command import SUITES

TEXT = (ROOT / "README.md").read_text()


def snippet(words: str) -> str:
    """The one that holds `words`."""
    found = [text for text in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if words in text]
    assert len(found) == 1, f"{len(found)} snippets in README.md say {words!r}"
    return str(found[0])


def execute(program: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(program, "README.md", "exec"), {})


def run_on_two_ranks(program: str, folder: Path) -> None:
    run_ranks(2, execute, program, str(folder), backend=None, env=AGENT_STORE)


def test_the_program_with_ddp_runs(tmp_path: Path) -> None:
    run_on_two_ranks(snippet("DistributedDataParallel("), tmp_path)


# What the snippet about writes by hand takes for granted.
BY_HAND = """
loss = (model(x).float() - x).square().mean()
loss.backward()
model.head = model.layers[0].linear1
student, teacher = model, zeropg.fully_shard(torch.nn.TransformerEncoder(layer, 4), stage=1)
"""


def test_the_sharded_program_runs_and_saves_and_loads(tmp_path: Path) -> None:
    program = [
        snippet("zeropg.save_16bit_weights"),
        BY_HAND,
        snippet("zeropg.writable_shards"),
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)",
        snippet("zeropg.save_checkpoint"),
        "assert extra['step'] == 9 and rank_extra['rng'].dtype == torch.uint8",
        snippet("zeropg.dcp_state_dict"),
    ]
    run_on_two_ranks("\n".join(program), tmp_path)
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_the_program_for_deepspeed_runs(tmp_path: Path) -> None:
    check = "assert engine.global_steps == 8 and client_state == {'epoch': 1}"
    run_on_two_ranks("\n".join([snippet("zeropg.deepspeed as deepspeed"), check]), tmp_path)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step8"


def test_the_program_for_the_trainer_runs(tmp_path: Path) -> None:
    run_on_two_ranks(snippet("zeropg.transformers"), tmp_path)
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "runs/hf/final").iterdir()}
    assert (tmp_path / "runs/hf/checkpoint-4/zeropg").is_dir()


def test_the_program_with_a_packed_base_runs(tmp_path: Path) -> None:
    check = "assert all(p.dtype == torch.uint8 for n, p in lora.named_parameters() if n.endswith('packed_weight'))"
    begin = "import torch\nimport zeropg\ntorch.distributed.init_process_group('zeropg')"
    run_on_two_ranks("\n".join([begin, snippet("zeropg.quantize_frozen(base)"), check]), tmp_path)


PLAIN_MODEL = """
import torch
import torch.distributed as dist
import zeropg
from torch.distributed.fsdp import FSDPModule

dist.init_process_group("zeropg")
model = torch.nn.Linear(64, 64)
"""
STEP = """
model(torch.randn(8, 64, dtype=next(model.parameters()).dtype)).sum().backward()
"""


def test_all_ways_to_compress_run(tmp_path: Path) -> None:
    way, way_of_fsdp2 = snippet("ddp_hook").split("state = State", 1)
    program = [
        PLAIN_MODEL,
        "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))",
        way,
        STEP,
        "ddp(torch.randn(8, 64)).sum().backward()",
        "model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(64, 64))",
        "state = State" + way_of_fsdp2,
        STEP,
    ]
    run_on_two_ranks("\n".join(program), tmp_path)


def test_a_reduction_that_does_not_wait_runs(tmp_path: Path) -> None:
    register, close = snippet("partial_hook").split("...  # training")
    ddp = "ddp = torch.nn.parallel.DistributedDataParallel(model)"
    steps = "for _ in range(4):\n    ddp(torch.randn(8, 64)).sum().backward()\nassert 1 <= partial.contributors <= 2"
    run_on_two_ranks("\n".join([PLAIN_MODEL, ddp, register, steps, close]), tmp_path)


def test_offload_runs(tmp_path: Path) -> None:
    program = [PLAIN_MODEL, snippet("offload_optimizer").replace("/nvme/scratch", str(tmp_path)), STEP]
    run_on_two_ranks("\n".join([*program, "optimizer.step()"]), tmp_path)


def test_hybrid_sharding_runs(tmp_path: Path) -> None:
    program = [PLAIN_MODEL, "nodes, ranks_per_node = 1, 2", snippet("(nodes, ranks_per_node)"), STEP]
    run_on_two_ranks("\n".join(program), tmp_path)


def test_tensor_parallelism_runs(tmp_path: Path) -> None:
    model = "model = torch.nn.Sequential()\nmodel.up, model.down = torch.nn.Linear(64, 32), torch.nn.Linear(32, 64)"
    program = [PLAIN_MODEL, model, "dp, tp = 1, 2", snippet("parallelize_module"), STEP]
    run_on_two_ranks("\n".join(program), tmp_path)


def test_the_table_of_commands_has_them_all() -> None:
    section = TEXT.split("\n## Commands", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `([^`]+)` \| \S", section, re.MULTILINE))
    assert named == {*COMMANDS} - {"bench"} | {f"bench {suite}" for suite in SUITES}


@pytest.mark.parametrize("command", ["doctor", "topo", "simulate", "plan --params 7e9"])
def test_commands_run_for_a_user_who_has_nothing_yet(tmp_path: Path, command: str) -> None:
    """And leave nothing behind, in the home or where they are called."""
    (tmp_path / "home").mkdir()
    package = str(Path(zeropg.__file__).parents[1])
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "PYTHONPATH": package}
    words = [sys.executable, "-m", "zeropg", *command.split()]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["home"]
