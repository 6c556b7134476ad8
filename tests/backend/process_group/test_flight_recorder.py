"""What the last operations were: dumps that torch's analyzer reads, from torch's recorder and from our own."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.deadlines import give_seconds, new_group_with
from tests.processes import run_program
from tests.spawn import RankPool, run_ranks


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    with RankPool(2) as pool:  # of its own: torch's recorder knows all that the process ever did
        yield pool.run


def communicate(group: Any) -> None:
    rank, ones = dist.get_rank(), torch.ones(4)
    dist.all_reduce(ones, group=group)
    dist.all_gather([torch.empty(4), torch.empty(4)], ones, group=group)
    dist.all_gather_into_tensor(torch.empty(8), ones, group=group)
    dist.reduce_scatter_tensor(torch.empty(2), ones, group=group)
    dist.broadcast(ones, 0, group=group)
    if rank == 0:
        dist.send(ones, 1, group=group)
    else:
        dist.recv(ones, 0, group=group)
    dist.barrier(group)


def dump(folder: str) -> None:
    import zeropg

    communicate(dist.group.WORLD)
    communicate(dist.new_group([0, 1], group_desc="pair"))
    path = f"{folder}/trace{dist.get_rank()}"
    assert zeropg.dump_flight_recorder(path) == path
    assert Path(path).stat().st_mode & 0o777 == 0o600


def analyze(folder: Path) -> Any:
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    args = JobConfig().parse_args([str(folder), "--prefix", "trace"])
    details, version = read_dir(args)
    assert isinstance(args, argparse.Namespace)
    return build_db(details, args, version)


def check_analysis(folder: Path) -> None:
    database = analyze(folder)
    assert sorted((group.desc, group.size) for group in database.groups) == [("default_pg", 2), ("pair", 2)]
    seen = [(collective.pass_check, collective.collective_name) for collective in database.collectives]
    assert len(seen) == 14 and all(good for good, _ in seen), seen
    assert {call.global_rank for call in database.ncclcalls} == {0, 1}
    assert all(collective.collective_state == "completed" for collective in database.collectives), seen


def test_torchs_analyzer_matches_the_ranks_of_a_dump(run: Callable[..., Any], tmp_path: Path) -> None:
    run(dump, str(tmp_path))
    check_analysis(tmp_path)


def dump_own(folder: str) -> None:
    """As on a torch without hooks, whatever this torch is."""
    from zeropg.flight_recorder import own_trace

    groups = [dist.new_group([0, 1], group_desc=description) for description in ("default_pg", "pair")]
    for group in groups:
        group._get_backend(torch.device("cpu")).start_recording()
        communicate(group)
    trace = own_trace()
    trace["entries"] = [entry for entry in trace["entries"] if entry["process_group"][0] in names(groups)]
    trace["pg_config"] = {name: trace["pg_config"][name] for name in names(groups)}
    Path(f"{folder}/trace{dist.get_rank()}").write_bytes(pickle.dumps(trace))


def names(groups: list[Any]) -> list[str]:
    return [group.group_name for group in groups]


def test_the_analyzer_reads_what_groups_record_themselves(run: Callable[..., Any], tmp_path: Path) -> None:
    run(dump_own, str(tmp_path))
    check_analysis(tmp_path)


def leave_one_operation_open(folder: str, own: bool) -> None:
    import zeropg
    from zeropg.flight_recorder import own_trace

    group = dist.new_group(timeout=timedelta(seconds=60))
    if own:
        group._get_backend(torch.device("cpu")).start_recording()
    dist.all_reduce(torch.ones(3), group=group)
    give_seconds(group, 4)
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="timed out"):
            dist.all_reduce(torch.ones(5), group=group)
    path = Path(f"{folder}/trace{dist.get_rank()}")
    if own:
        path.write_bytes(pickle.dumps(own_trace()))
    else:
        zeropg.dump_flight_recorder(path)
    entries = [entry for entry in pickle.loads(path.read_bytes())["entries"] if "all_reduce" in entry["profiling_name"]]
    is_torchs = not own and hasattr(dist.distributed_c10d, "FlightRecorderHook")
    recorded_ms = 60_000 if is_torchs else 4_000  # torch's recorder asks for it when the group is made
    states = [(entry["state"], entry["input_sizes"]) for entry in entries[-2:]]
    if dist.get_rank() == 0:
        assert states == [("completed", [[3]]), ("scheduled", [[5]])], states
        assert entries[-2]["duration_ms"] > 0 and entries[-1]["timeout_ms"] == recorded_ms
    else:
        assert states[-1] == ("completed", [[3]]), states


@pytest.mark.parametrize("own", [False, True])
def test_what_never_completed_says_so(run: Callable[..., Any], tmp_path: Path, own: bool) -> None:
    run(leave_one_operation_open, str(tmp_path), own)


def number_messages(folder: str, own: bool) -> tuple[list[int], str]:
    """What the recorder counted, and the error of the last receive before its message came."""
    import zeropg
    from zeropg.flight_recorder import own_trace

    group, ones, error = dist.new_group(), torch.ones(2), ""
    if own:
        group._get_backend(torch.device("cpu")).start_recording()
    if dist.get_rank() == 0:
        dist.recv(ones, 1, group=group)
        dist.send(ones, 1, group=group)
        dist.barrier(group)
        dist.send(ones, 1, group=group, tag=5)
    else:
        dist.send(ones, 0, group=group)
        dist.recv(ones, 0, group=group)
        pending = dist.irecv(ones, 0, group=group, tag=5)
        with pytest.raises(dist.DistBackendError) as caught:
            pending.wait(timedelta(milliseconds=1))
        error = str(caught.value)
        dist.barrier(group)
        pending.wait()
    path = Path(f"{folder}/trace{dist.get_rank()}")
    trace = own_trace() if own else pickle.loads(Path(zeropg.dump_flight_recorder(path)).read_bytes())
    entries = [entry for entry in trace["entries"] if entry["process_group"][0] == group.group_name]
    return [entry["p2p_seq_id"] for entry in entries if entry["is_p2p"]], error


@pytest.mark.parametrize("own", [False, True])
def test_errors_count_messages_as_the_recorder_does(run: Callable[..., Any], tmp_path: Path, own: bool) -> None:
    answers = run(number_messages, str(tmp_path), own)
    assert [numbers for numbers, _ in answers] == [[1, 2, 3], [1, 2, 3]]
    assert "recv #3 from rank 0 with tag 5 (8 bytes): not complete" in answers[1][1], answers[1][1]


def fail_and_wait_for_a_dump(prefix: str) -> None:
    import time

    dist.all_reduce(torch.ones(2))
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="timed out"):
            dist.broadcast(torch.ones(2), 0, group=new_group_with(1))
    else:
        dist.new_group()
    path = Path(f"{prefix}{dist.get_rank()}")
    names: list[str] = []
    limit = time.monotonic() + (60 if dist.get_rank() == 0 else 0)
    while not names and time.monotonic() < limit:
        time.sleep(0.1)
        with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError):  # it is still being written
            names = [entry["profiling_name"] for entry in pickle.loads(path.read_bytes())["entries"]]
    assert dist.get_rank() != 0 or "zeropg:broadcast" in names


@pytest.mark.skipif(not hasattr(dist.distributed_c10d, "FlightRecorderHook"), reason="torch 2.15 dumps by its hooks")
def test_a_failure_dumps_by_itself(tmp_path: Path) -> None:
    env = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace"}
    run_ranks(2, fail_and_wait_for_a_dump, f"{tmp_path}/trace", env=env, fresh=True, timeout=180)


def test_a_dump_needs_a_group() -> None:
    import zeropg

    assert "torch" in sys.modules and not dist.is_initialized()
    with pytest.raises(ValueError, match="init_process_group"):
        zeropg.dump_flight_recorder()


ENDING = """
import time
import torch
import torch.distributed as dist

def keep_books():
    time.sleep(1)
    print("kept", flush=True)

dist.init_process_group("zeropg", store=dist.HashStore(), rank=0, world_size=1)
dist.group.WORLD.register_abort_hook(1, keep_books)
dist.all_reduce(torch.ones(2))
dist.group.WORLD.abort()
"""


@pytest.mark.skipif(not hasattr(dist.distributed_c10d, "FlightRecorderHook"), reason="torch 2.15 dumps by its hooks")
def test_the_interpreter_ends_after_the_dump_of_a_failure(tmp_path: Path) -> None:
    env = {**os.environ, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace"}
    done = run_program([sys.executable, "-c", "import zeropg" + ENDING], env=env, timeout=120)
    assert done.returncode == 0 and "kept" in done.stdout, (done.returncode, done.stdout, done.stderr)
    names = [entry["profiling_name"] for entry in pickle.loads((tmp_path / "trace0").read_bytes())["entries"]]
    assert names == ["zeropg:all_reduce"]
