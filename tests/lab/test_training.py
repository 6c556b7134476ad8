"""Training on two hosts: the losses of one host, and of gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import zeropg
from tests.cpp_program.test_cpp_program import PROGRAM, finish, losses
from tests.sharding.module.test_same_losses import STAGES, Run, assert_same_bits, relative_difference, train_sharded
from tests.small_gpt import LEARNING_RATE, loss_of, make_batches, make_model, train_plain
from tests.spawn import RankPool
from tests.wires import USABLE_WIRES
from zeropg.tools.lab.lab import Lab

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("needs_lab")]

TINY = ["--steps", "8", "--batch", "8", "--context", "64", "--layers", "2", "--width", "32", "--heads", "2"]


def validation_losses(folder: Path) -> list[float]:
    return [loss for _, loss in json.loads((folder / "results.json").read_text())["validation_curve"]]


# The main job has no option for what carries its bytes.
OVER_UCX = """
import functools, sys
import torch.distributed as dist
from zeropg.backend import BackendOptions
from zeropg.tools.train.command import main
dist.init_process_group = functools.partial(dist.init_process_group, pg_options=BackendOptions(network="ucx"))
status = main(sys.argv[1:])
assert "libucp" in open("/proc/self/maps").read()
sys.exit(status)
"""


@pytest.mark.soak
def test_the_main_job_has_the_losses_of_one_host_and_of_gloo(lab: Lab, tmp_path: Path) -> None:
    def job(name: str, backend: str) -> list[str]:
        options = ["--backend", backend, "--stage", "3", "--param-dtype", "float32", "--output", str(tmp_path / name)]
        command = [str(tmp_path / "over_ucx.py")] if name == "ucx" else ["-m", "zeropg", "train"]
        return [*command, *TINY, *options]

    here = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run([*here, *job("here", "zeropg")], env=lab.environment(0), capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    (tmp_path / "over_ucx.py").write_text(OVER_UCX)
    backends = {"gloo": "gloo", "zeropg": "zeropg"} | ({"ucx": "zeropg"} if "ucx" in USABLE_WIRES else {})
    for name, backend in backends.items():
        hosts = lab.torchrun(*job(name, backend), nproc_per_node=2).wait(timeout=180)
        assert [host.returncode for host in hosts] == [0, 0], [host.stderr for host in hosts]

    truth = validation_losses(tmp_path / "here")
    assert truth[-1] < truth[0]
    for name in backends:
        assert validation_losses(tmp_path / name) == pytest.approx(truth, rel=1e-4), name


def train_stages() -> dict[int, Run]:
    torch.set_num_threads(1)
    return {stage: train_sharded(stage, torch.float64) for stage in STAGES}


@pytest.mark.parametrize("backend", ["gloo", "zeropg"])
def test_every_stage_trains_as_one_plain_process(lab_pool: Callable[[str], RankPool], backend: str) -> None:
    truth = train_plain(torch.float64)
    results = lab_pool(backend).run(train_stages, timeout=180)
    for stage, run in results[0].items():
        assert relative_difference(run, truth) <= 1e-12, stage
        for other in results[1:]:
            assert_same_bits(other[stage], run)
        if backend == "zeropg":  # gloo adds in another order for each size
            assert_same_bits(run, results[0][0])


def ddp_losses() -> list[float]:
    torch.set_num_threads(1)
    model = DDP(make_model(torch.float64), bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    result = []
    for batch in make_batches(8):
        loss = loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        result.append(total.item() / dist.get_world_size())
    return result


def test_ddp_has_the_losses_of_gloo(lab_pool: Callable[[str], RankPool]) -> None:
    gloo, ours = (lab_pool(backend).run(ddp_losses, timeout=90) for backend in ("gloo", "zeropg"))
    assert len({tuple(rank) for rank in ours}) == 1
    assert ours[0] == pytest.approx(gloo[0], rel=1e-12)
    assert ours[0][-1] < ours[0][0]


def reduce_megabytes(numel: int) -> float:
    tensor = torch.full((numel,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    return float(tensor.unique().item())


def test_an_all_reduce_sends_each_byte_once_from_each_host(lab: Lab, lab_pool: Callable[[str], RankPool]) -> None:
    pool, numel = lab_pool("zeropg"), 1 << 21
    pool.run(reduce_megabytes, 1)
    before = [lab.interface_bytes(host).tx for host in (0, 1)]
    assert pool.run(reduce_megabytes, numel) == [6.0] * 4
    for host in (0, 1):
        sent = lab.interface_bytes(host).tx - before[host]
        # The lower bound: 2 (n - 1) / n of the data for n = 2 hosts, however many ranks each has. gloo's ring: 1.5.
        assert 4 * numel <= sent <= 1.05 * 4 * numel


def fetch_over_nodes() -> str:
    model = zeropg.fully_shard(make_model(), stage=3)
    return str(model._zeropg.fetch_name)


def test_stage_3_gathers_units_once_for_each_node(lab_pool: Callable[[str], RankPool]) -> None:
    assert lab_pool("zeropg").run(fetch_over_nodes, timeout=60) == ["gathered per node"] * 4


def test_a_cpp_program_trains_across_hosts(lab: Lab, tmp_path: Path) -> None:
    if not PROGRAM.is_file():
        pytest.skip(f"{PROGRAM} has not been built; run `make build`")
    plain = subprocess.run([PROGRAM, "plain", "0", "0", "1", "unused"], capture_output=True, text=True, check=True)
    store = tmp_path / "store"
    outputs = finish([lab.run(rank, [str(PROGRAM), "zeropg", "3", str(rank), "2", str(store)]) for rank in (0, 1)])
    assert "fetch gathered" in outputs[0]
    assert losses(outputs[0]) == losses(outputs[1]) == pytest.approx(losses(plain.stdout), rel=1e-5)
