"""The harness itself: a test that cannot fail, or that hangs, is worth nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import kill_with_children
from tests.spawn import RankPool, RanksFailed, run_ranks


def _sum_of_ranks(base: int) -> tuple[int, int]:
    tensor = torch.tensor([base + dist.get_rank()])
    dist.all_reduce(tensor)
    return int(tensor.item()), os.getpid()


def _raise_on_rank_one() -> None:
    print("rank", dist.get_rank(), "was here")
    if dist.get_rank() == 1:
        raise ValueError("the reason")


def _pid_then_sleep(folder: str) -> None:
    path = Path(folder) / os.environ["RANK"]
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)  # whoever sees it finds the whole number
    time.sleep(600)


def _die_on_rank_one() -> str:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["FLAVOUR"]


def _die_soon_on_rank_one() -> int:
    if os.environ["RANK"] == "1":
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return os.getpid()


def _die_while_a_child_holds_the_pipe() -> None:
    if os.environ["RANK"] == "1":
        if os.fork() == 0:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)


def _exit_badly() -> None:
    import atexit

    dist.destroy_process_group()
    atexit.register(os._exit, 7)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_run_ranks_returns_each_ranks_result_and_leaves_no_process() -> None:
    results = run_ranks(3, _sum_of_ranks, 10, backend="gloo")
    assert [value for value, _ in results] == [33, 33, 33]
    assert not any(_is_alive(pid) for _, pid in results)


def test_rank_pool_keeps_its_processes_between_calls_and_starts_anew_after_a_failure() -> None:
    with RankPool(2, backend="gloo") as pool:
        first, second = pool.run(_sum_of_ranks, 1), pool.run(_sum_of_ranks, 1)
        assert first == second
        with pytest.raises(RanksFailed):
            pool.run(_raise_on_rank_one)
        assert [value for value, _ in pool.run(_sum_of_ranks, 1)] == [3, 3]


def test_error_holds_the_traceback_and_the_output_of_the_rank() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _raise_on_rank_one, backend="gloo")
    assert list(caught.value.failures) == [1]
    assert "ValueError: the reason" in str(caught.value)
    assert "rank 1 was here" in str(caught.value)


def test_timeout_kills_every_rank_and_shows_where_each_was(tmp_path: Path) -> None:
    with RankPool(2, backend=None) as pool:
        pool.run(os.getpid)  # has started, which may take long
        with pytest.raises(RanksFailed, match="timed out") as caught:
            pool.run(_pid_then_sleep, str(tmp_path), timeout=8)
    assert "_pid_then_sleep" in caught.value.failures[0]
    assert not any(_is_alive(int(path.read_text())) for path in tmp_path.glob("[01]"))


def test_a_killed_program_takes_its_children_along(tmp_path: Path) -> None:
    note = tmp_path / "children"
    start_two = (
        "import os, pathlib, subprocess, time\n"
        "pids = [subprocess.Popen(['sleep', '600'], start_new_session=own).pid for own in (True, False)]\n"
        f"pathlib.Path({str(note)!r}).with_suffix('.new').write_text(' '.join(map(str, pids)))\n"
        f"os.rename({str(note.with_suffix('.new'))!r}, {str(note)!r})\n"
        "time.sleep(600)"
    )
    limit = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-S", "-c", start_two]) as program:
        while not note.exists() and time.monotonic() < limit:
            time.sleep(0.02)
        kill_with_children(program.pid)
    children = [int(pid) for pid in note.read_text().split()]
    while any(map(_is_alive, children)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert len(children) == 2 and not any(map(_is_alive, children))


def test_death_of_a_rank_is_a_failure_unless_expected() -> None:
    env = {"FLAVOUR": "salt"}
    with pytest.raises(RanksFailed, match="rank 1 died with exit code -9"):
        run_ranks(2, _die_on_rank_one, backend=None, env=env)
    assert run_ranks(2, _die_on_rank_one, backend=None, env=env, expect_death=[1]) == ["salt", None]


def test_death_between_two_calls_is_a_failure_of_the_second_and_the_third_starts_anew() -> None:
    with RankPool(2, backend=None) as pool:
        _, victim = pool.run(_die_soon_on_rank_one)
        while _is_alive(victim):
            time.sleep(0.02)
        with pytest.raises(RanksFailed, match="rank 1 died with exit code -9") as caught:
            pool.run(os.getpid)
        assert set(caught.value.failures) == {1}
        assert victim not in pool.run(os.getpid)


def test_death_is_seen_at_once_although_a_child_lives_on() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 died with exit code -9"):
        run_ranks(2, _die_while_a_child_holds_the_pipe, backend=None)
    assert time.monotonic() - start < 20


def test_crash_in_teardown_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="exit code 7"):
        run_ranks(1, _exit_badly, backend="gloo", fresh=True)


def test_fresh_ranks_read_variables_at_start() -> None:
    assert run_ranks(1, _threads, backend=None, env={"OMP_NUM_THREADS": "1"}, fresh=True) == [1]


def _threads() -> int:
    return torch.get_num_threads()


def test_ranks_die_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "from tests.spawn import run_ranks; from tests.test_spawn import _pid_then_sleep\n"
        f"if __name__ == '__main__': run_ranks(2, _pid_then_sleep, {str(tmp_path)!r}, backend=None)"
    )
    # A killed program cleans up nothing; its sockets' paths must be short.
    with tempfile.TemporaryDirectory(prefix="zeropg-killed-", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {"TMPDIR": folder}
        process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parent.parent, env=environment)
        limit = time.monotonic() + 150
        while len(list(tmp_path.glob("[01]"))) < 2 and time.monotonic() < limit:
            time.sleep(0.05)
        process.kill()
        process.wait()
        pids = [int(path.read_text()) for path in tmp_path.glob("[01]")]
        while any(map(_is_alive, pids)) and time.monotonic() < limit:
            time.sleep(0.05)
    assert len(pids) == 2 and not any(map(_is_alive, pids))
