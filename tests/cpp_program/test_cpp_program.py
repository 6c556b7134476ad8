"""A C++ program trains a sharded libtorch module without Python: in the tree's build, and built as a stranger would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.test_cpp import BUILD, ROOT

PROGRAM = BUILD / "tests" / "cpp_program" / "train"
STEPS = 6


def start(command: list[str | Path], rank: int, world_size: int, store: Path) -> subprocess.Popen[str]:
    """Runs `command <rank> <world size> <store>`."""
    return subprocess.Popen(
        [*command, str(rank), str(world_size), store], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(processes: list[subprocess.Popen[str]], timeout: float = 120) -> list[str]:
    """The output of each process, all of which must succeed."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [out for out, _ in outputs]


@pytest.fixture(scope="module")
def program() -> Path:
    if not PROGRAM.is_file():
        pytest.skip(f"{PROGRAM} has not been built; run `make build`")
    return PROGRAM


@pytest.fixture(scope="module")
def plain_losses(program: Path) -> list[float]:
    return losses(finish([start([program, "plain", "0"], 0, 1, Path("unused"))])[0])


def losses(output: str) -> list[float]:
    found = [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", output)]
    assert len(found) == STEPS, output
    return found


def train(program: Path, folder: Path, mode: str, stage: int, world_size: int = 2) -> list[str]:
    store = folder / f"store_{mode}_{stage}_{world_size}"
    return finish([start([program, mode, str(stage)], rank, world_size, store) for rank in range(world_size)])


def value(name: str, output: str) -> float:
    match = re.search(rf"{name} (\S+)", output)
    assert match is not None, output
    return float(match[1])


def test_every_stage_has_the_losses_of_the_plain_module(
    program: Path, tmp_path: Path, plain_losses: list[float]
) -> None:
    assert plain_losses[-1] < plain_losses[0]
    outputs = [train(program, tmp_path, "zeropg", stage)[0] for stage in range(4)]
    assert [re.search("fetch (.*)", output)[1] for output in outputs] == ["replicated"] * 3 + ["shared"]  # type: ignore[index]
    for output in outputs:
        assert losses(output) == losses(outputs[0]), "stages differ in bits"
        assert losses(output) == pytest.approx(plain_losses, rel=1e-5)
        assert value("plain copy", output) == pytest.approx(value("sharded", output), rel=1e-6)


@pytest.mark.parametrize("mode", ["foreign", "two_groups", "limits"])
def test_any_c10d_backend_will_do(program: Path, tmp_path: Path, plain_losses: list[float], mode: str) -> None:
    output = train(program, tmp_path, mode, stage=3)[0]
    assert "fetch gathered" in output
    assert losses(output) == pytest.approx(plain_losses, rel=1e-5)
    assert value("plain copy", output) == pytest.approx(value("sharded", output), rel=1e-6)


def test_other_world_sizes(program: Path, tmp_path: Path, plain_losses: list[float]) -> None:
    for world_size in (1, 4):
        output = train(program, tmp_path, "zeropg", 3, world_size)[0]
        assert losses(output) == pytest.approx(plain_losses, rel=1e-5)


def test_bfloat16_with_fp32_masters(program: Path, tmp_path: Path, plain_losses: list[float]) -> None:
    outputs = [train(program, tmp_path, "bfloat16", stage)[0] for stage in (1, 3)]
    assert losses(outputs[0]) == losses(outputs[1])
    assert losses(outputs[0]) == pytest.approx(plain_losses, rel=0.1)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_loading_accumulating_and_errors(program: Path, tmp_path: Path, stage: int) -> None:
    train(program, tmp_path, "rest", stage)


def test_wrong_options_are_clear(program: Path, tmp_path: Path) -> None:
    ranks = [start([program, "zeropg", str(stage)], rank, 2, tmp_path / "s") for rank, stage in enumerate((2, 4))]
    errors = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert "rank 1 could not shard its model and says why" in errors[0]
    assert "stage is 4; expected 0, 1, 2 or 3" in errors[1]


def test_a_killed_rank_is_an_error_on_the_other(program: Path, tmp_path: Path) -> None:
    ranks = [start([program, "zeropg", "3"], rank, 2, tmp_path / "s") for rank in range(2)]
    assert ranks[1].stdout is not None and ranks[1].stdout.readline().startswith("fetch")
    ranks[1].kill()
    _, error = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode in (0, 1)
    if ranks[0].returncode == 1:  # it was not through already
        assert re.search(r"\[zeropg rank 0/2\].*rank 1", error, re.DOTALL)
    ranks[1].communicate()


@pytest.mark.slow
def test_what_readme_says_builds_and_trains_against_the_package_alone(tmp_path: Path) -> None:
    """Program, project and commands word for word, for a user with an activated environment and nothing else."""
    spec = find_spec("zeropg")
    tools = Path(sys.executable).parent
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    if spec is None or spec.origin is None or shutil.which("cmake", path=path) is None:
        pytest.skip("needs the package (installed, or on PYTHONPATH) and cmake")
    section = (ROOT / "README.md").read_text().split("## C++", 1)[1].split("\n## ", 1)[0]
    blocks = dict(re.findall(r"^```(\w*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
    assert blocks.keys() == {"cpp", "cmake", ""}
    (tmp_path / "train.cpp").write_text(blocks["cpp"])
    (tmp_path / "CMakeLists.txt").write_text(blocks["cmake"])
    (tmp_path / "home").mkdir()
    own = {"PATH": path, "HOME": str(tmp_path / "home"), "VIRTUAL_ENV": str(tools.parent), "CXXFLAGS": "-O0"}
    own["PYTHONPATH"] = str(Path(spec.origin).parents[1])  # as if it were installed there
    done = subprocess.run(
        ["bash", "-c", blocks[""]], cwd=tmp_path, env=own, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 2 * 20, done.stdout + done.stderr
    assert max(losses[-2:]) < min(losses[:2])
    assert not any((tmp_path / "home").iterdir())
