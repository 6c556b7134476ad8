"""The architecture, checked: includes point one way, and nothing in the tree or the build knows where it was built.

{ python, cpp } -> sharding -> backend -> { compression, backend/transport }
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_cpp import BUILD, ROOT

# Folder -> the folders (and their subfolders, unless those have a line of their own) that its files may include.
# backend/topology.h is pure data: it may be read below the backend too; so is when to write past the caches.
ALLOWED = {
    "compression": {"compression"},
    "backend/transport": {"backend/transport", "backend/topology.h"},
    "backend/collectives": {"backend/collectives", "backend/topology.h", "backend/transport/copy.h", "compression"},
    "backend": {"backend", "backend/collectives", "backend/transport", "compression"},
    "sharding": {"sharding", "backend", "backend/collectives", "backend/transport", "compression"},
    "cpp": {"cpp", "sharding", "backend"},
    "cpp/zeropg": set(),  # what programs include: it names itself and torch in angle brackets
    "python/bindings": {
        "python/bindings",
        "sharding",
        "backend",
        "backend/collectives",
        "backend/transport",
        "compression",
    },
}
TORCH = re.compile(r"<(torch|ATen|c10|pybind11)/|<Python\.h>")
PYTHON = re.compile(r"<(torch/extension\.h|torch/csrc/utils/|torch/csrc/autograd/python|pybind11/|Python\.h)")
FORBIDDEN_FOLDERS = {"common", "util", "utils", "misc", "helpers"}
ROOM_FOLDERS = ("compression", "backend", "sharding", "cpp", "python", "tests", "benchmarks")


def sources() -> list[Path]:
    return [
        path.relative_to(ROOT)
        for folder in ("compression", "backend", "sharding", "cpp", "python/bindings")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}
    ]


def includes(path: Path) -> Iterator[str]:
    """What stands after #include, with its quotes or angle brackets."""
    for line in (ROOT / path).read_text().splitlines():
        if match := re.match(r'\s*#\s*include\s+(["<][^">]+[">])', line):
            yield match[1]


def room(path: Path) -> str:
    """The longest folder of ALLOWED that the path lies in."""
    return max((folder for folder in ALLOWED if path.is_relative_to(folder)), key=len)


def test_quoted_includes_name_files_from_the_root() -> None:
    wrong = [f"{path}: {name}" for path in sources() for name in includes(path) if name[0] == '"' and not exists(name)]
    assert not wrong, "written from the root of the repository, in quotes:\n" + "\n".join(wrong)


def exists(name: str) -> bool:
    return (ROOT / name.strip('"')).is_file()


def test_includes_point_one_way() -> None:
    wrong = []
    for path in sources():
        for name in includes(path):
            target = Path(name.strip('"'))
            if name[0] == '"' and exists(name) and not {room(target), str(target)} & ALLOWED[room(path)]:
                wrong.append(f"{path} ({room(path)}) includes {target} ({room(target)})")
    assert not wrong, "\n".join(wrong)


def test_collectives_codecs_and_topology_include_no_torch() -> None:
    pure_rooms = {"backend/collectives", "compression"}
    pure = [path for path in sources() if room(path) in pure_rooms or path.name.startswith("topology.")]
    wrong = [f"{path}: {name}" for path in pure for name in includes(path) if TORCH.match(name)]
    assert not wrong, "schedules and codecs are plain C++:\n" + "\n".join(wrong)


def test_only_bindings_include_python() -> None:
    core = [path for path in sources() if room(path) != "python/bindings"]
    wrong = [f"{path}: {name}" for path in core for name in includes(path) if PYTHON.match(name)]
    assert not wrong, "the core library does not link libtorch_python:\n" + "\n".join(wrong)


def test_no_folder_for_leftovers() -> None:
    wrong = [path for folder in ROOM_FOLDERS for path in (ROOT / folder).rglob("*/") if path.name in FORBIDDEN_FOLDERS]
    assert not wrong


def test_no_file_mentions_a_path_of_the_machine_it_was_written_on() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [ROOT / name for name in listing.stdout.split("\0") if name and name != "tests/test_layout.py"]
    pattern = re.compile(rf"/home/\w|/root/|{re.escape(str(ROOT))}/".encode())
    wrong = [str(path) for path in tracked if path.is_file() and pattern.search(path.read_bytes())]
    assert not wrong


def test_libraries_do_not_mention_where_they_were_built() -> None:
    libraries = sorted((BUILD / "python" / "zeropg").glob("*.so"))
    if not libraries:
        pytest.skip(f"no libraries in {BUILD}; run `make build`")
    wrong = [path.name for path in libraries if str(ROOT).encode() in path.read_bytes()]
    assert not wrong
