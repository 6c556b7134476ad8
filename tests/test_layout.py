"""The architecture, checked: includes point one way, and nothing in the tree or the build knows where it was built.

{ python, cpp } -> sharding -> backend -> compression
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.declarations import members
from tests.test_cpp import BUILD, ROOT

# Folder -> the other folders whose files it may include. All stand above it, so no arrow points up or in a circle.
ALLOWED: dict[str, set[str]] = {
    "compression": set(),
    "backend/platform/cpu": set(),
    "compression/quantized": {"backend/platform/cpu", "compression"},
    "compression/selective": {"backend/platform/cpu", "compression", "compression/quantized"},
    "compression/weights": {"backend/platform/cpu", "compression/quantized"},
    "compression/registry": {"compression", "compression/quantized", "compression/selective"},
    "backend/cryptography": set(),
    "backend/diagnostics": set(),
    "backend/platform/process": {"backend/platform/cpu", "backend/diagnostics"},
    "backend/platform/memory": {"backend/platform/cpu", "backend/platform/process"},
    "backend/topology": {"backend/platform/cpu", "backend/diagnostics"},
    "backend/transport": set(),
    "backend/transport/network/ucx": set(),
    "backend/transport/network": {
        "backend/cryptography",
        "backend/platform/process",
        "backend/diagnostics",
        "backend/transport",
        "backend/transport/network/ucx",
    },
    "backend/transport/shm": {
        "backend/platform/cpu",
        "backend/platform/memory",
        "backend/platform/process",
        "backend/diagnostics",
        "backend/transport",
    },
    "backend/bootstrap/sockets": {
        "backend/cryptography",
        "backend/platform/process",
        "backend/diagnostics",
        "backend/topology",
        "backend/transport/network",
    },
    "backend/bootstrap": {
        "backend/bootstrap/sockets",
        "backend/cryptography",
        "backend/platform/cpu",
        "backend/platform/memory",
        "backend/platform/process",
        "backend/diagnostics",
        "backend/topology",
        "backend/transport/network",
        "backend/transport/shm",
    },
    "backend/collectives/reduce": {"backend/platform/cpu"},
    "backend/collectives/schedule": {"compression", "backend/collectives/reduce"},
    "backend/collectives/phases": {"backend/collectives/schedule"},
    "backend/collectives/select": {"backend/collectives/schedule", "backend/collectives/phases"},
    "backend/collectives/algorithms": {
        "backend/platform/cpu",
        "backend/collectives/schedule",
        "backend/collectives/phases",
    },
    "backend/collectives/algorithms/between_nodes": {"backend/collectives/schedule", "backend/collectives/phases"},
    "backend/simulator": {
        "compression",
        "backend/collectives/reduce",
        "backend/collectives/schedule",
        "backend/collectives/select",
    },
    "backend/group": {
        "compression",
        "backend/platform/process",
        "backend/diagnostics",
        "backend/topology",
        "backend/transport",
        "backend/transport/network",
        "backend/transport/shm",
        "backend/bootstrap",
        "backend/collectives/reduce",
        "backend/collectives/schedule",
        "backend/collectives/select",
    },
    "backend/engine": {
        "compression",
        "backend/platform/cpu",
        "backend/platform/process",
        "backend/diagnostics",
        "backend/topology",
        "backend/transport",
        "backend/transport/network",
        "backend/transport/shm",
        "backend/collectives/schedule",
        "backend/group",
    },
    "backend/p2p": {
        "backend/platform/cpu",
        "backend/platform/process",
        "backend/diagnostics",
        "backend/transport/shm",
        "backend/group",
        "backend/engine",
    },
    "backend/windows": {
        "backend/platform/cpu",
        "backend/platform/process",
        "backend/group",
        "backend/engine",
    },
    "backend/process_group": {
        "compression",
        "backend/diagnostics",
        "backend/platform/cpu",
        "backend/platform/memory",
        "backend/platform/process",
        "backend/topology",
        "backend/transport/network",
        "backend/transport/shm",
        "backend/bootstrap",
        "backend/group",
        "backend/engine",
        "backend/p2p",
        "backend/windows",
    },
    "backend/partial": {"backend/platform/process"},
    "sharding": {"backend/platform/memory"},
    "sharding/optim": {"backend/platform/cpu"},
    "sharding/checkpoint": {"backend/platform/cpu", "backend/diagnostics"},
    "sharding/offload": {"backend/diagnostics", "sharding", "sharding/checkpoint", "sharding/optim"},
    "sharding/comm": {"backend/diagnostics", "backend/group", "backend/process_group"},
    "sharding/parameters": {"compression", "sharding", "sharding/comm", "sharding/offload"},
    "sharding/fetch": {"backend/process_group", "sharding/comm", "sharding/parameters"},
    "sharding/units": {"sharding/comm", "sharding/parameters", "sharding/fetch"},
    "sharding/gradients": {"sharding/comm", "sharding/parameters"},
    "sharding/module": {
        "sharding/comm",
        "sharding/parameters",
        "sharding/fetch",
        "sharding/units",
        "sharding/gradients",
    },
    "cpp/zeropg": set(),  # what programs include: it names itself and torch in angle brackets
    "cpp": {"backend/process_group", "sharding/comm", "sharding/parameters", "sharding/units", "sharding/module"},
    "python/bindings": {
        "backend/bootstrap/sockets",
        "compression",
        "compression/weights",
        "compression/registry",
        "backend/platform/cpu",
        "backend/platform/process",
        "backend/diagnostics",
        "backend/topology",
        "backend/transport/network",
        "backend/transport/shm",
        "backend/collectives/reduce",
        "backend/collectives/select",
        "backend/simulator",
        "backend/process_group",
        "backend/partial",
        "sharding/checkpoint",
        "sharding/offload",
        "sharding/optim",
        "sharding/module",
    },
}
# Schedules, codecs and what they stand on are plain C++.
WITHOUT_TORCH = {
    "compression",
    "compression/quantized",
    "compression/selective",
    "compression/weights",
    "compression/registry",
    "backend/cryptography",
    "backend/platform/cpu",
    "backend/topology",
    "backend/collectives/reduce",
    "backend/collectives/schedule",
    "backend/collectives/select",
    "backend/collectives/algorithms",
    "backend/collectives/algorithms/between_nodes",
    "backend/simulator",
}
# The same for Python: a file or folder of python/zeropg, and the others that it may import.
ALLOWED_PYTHON: dict[str, set[str]] = {
    "_native": set(),
    "_notices": {"_native"},
    "quantization": {"_native"},
    "rank_io": {"_native"},
    "compression": {"_native", "rank_io"},
    "backend": {"_native", "rank_io", "compression"},
    "flight_recorder": {"backend"},
    "partial": {"_native", "rank_io", "backend"},
    "tensor_parallel": {"_native", "rank_io", "backend"},
    "sharding": {"_native", "compression", "rank_io", "backend", "tensor_parallel"},
    "optim": {"_native", "compression", "rank_io", "tensor_parallel", "sharding"},
    "export": {"_native", "quantization", "rank_io", "tensor_parallel", "sharding"},
    "checkpoint": {"_native", "compression", "rank_io", "tensor_parallel", "sharding", "optim", "export"},
    "deepspeed": {
        "compression",
        "quantization",
        "rank_io",
        "backend",
        "tensor_parallel",
        "sharding",
        "optim",
        "checkpoint",
    },
    "accelerate": {"sharding", "optim", "checkpoint"},
    "transformers": {"accelerate", "rank_io", "sharding", "checkpoint", "deepspeed"},
    "lightning": {"sharding", "optim", "checkpoint"},
    "__init__": {
        "_native",
        "_notices",
        "quantization",
        "compression",
        "backend",
        "flight_recorder",
        "partial",
        "sharding",
        "optim",
        "export",
        "checkpoint",
        "deepspeed",
    },
    "tools": {
        "_native",
        "compression",
        "rank_io",
        "backend",
        "sharding",
        "optim",
        "export",
        "checkpoint",
        "deepspeed",
        "__init__",
    },
    "__main__": set(),
}
MOST_FILES = 25
MOST_MEMBERS = 40
TORCH = re.compile(r"<(torch|ATen|c10|pybind11)/|<Python\.h>")
PYTHON = re.compile(r"<(torch/extension\.h|torch/csrc/utils/|torch/csrc/autograd/python|pybind11/|Python\.h)")
FORBIDDEN_FOLDERS = {"common", "util", "utils", "misc", "helpers"}
DEEPSPEEDS_OWN = "python/zeropg/deepspeed/utils"  # scripts import from it by this name
ROOM_FOLDERS = ("compression", "backend", "sharding", "cpp", "python", "tests", "benchmarks")


def sources() -> list[Path]:
    return [
        path.relative_to(ROOT)
        for top in ("compression", "backend", "sharding", "cpp", "python/bindings")
        for path in sorted((ROOT / top).rglob("*"))
        if path.suffix in {".h", ".cpp", ".inc", ".cu", ".cuh"}
    ]


def includes(path: Path) -> Iterator[str]:
    """What stands after #include, with its quotes or angle brackets."""
    for line in (ROOT / path).read_text().splitlines():
        if match := re.match(r'\s*#\s*include\s+(["<][^">]+[">])', line):
            yield match[1]


def folder(path: Path) -> str:
    return path.parent.as_posix()


def test_every_folder_is_in_the_order() -> None:
    folders = list(ALLOWED)
    assert {folder(path) for path in sources()} == set(folders)
    wrong = [
        f"{name} may include {below}, which does not stand above it"
        for place, name in enumerate(folders)
        for below in sorted(ALLOWED[name] - set(folders[:place]))
    ]
    assert not wrong, "\n".join(wrong)


def test_includes_point_one_way() -> None:
    wrong = []
    used: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for path in sources():
        for name in includes(path):
            target = folder(Path(name.strip('"')))
            if name[0] == '"' and target != folder(path):
                used[folder(path)].add(target)
                if target not in ALLOWED[folder(path)]:
                    wrong.append(f"{path} includes {name}: {target} is none of {sorted(ALLOWED[folder(path)])}")
    assert not wrong, "\n".join(wrong)
    assert used == ALLOWED, "an arrow that nothing needs any more is to be taken out of ALLOWED"


def python_room(module: str) -> str:
    """ "zeropg.optim.update.fused" -> "optim", "zeropg" -> "__init__"."""
    return [*module.split("."), "__init__"][1]


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports, anywhere in it: also in functions, also for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            yield from (name for name in names if name.split(".")[0] == "zeropg")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "zeropg":
            yield from (f"zeropg.{name}" if node.module == "zeropg" else node.module for name in names)


def test_python_imports_point_one_way() -> None:
    package = ROOT / "python" / "zeropg"
    used: dict[str, set[str]] = {name: set() for name in ALLOWED_PYTHON}
    wrong = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for module in imports(path):
            target = python_room(module)
            if target not in {room, "_C", "_built_for"}:
                used[room].add(target)
                if target not in ALLOWED_PYTHON[room]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}: none of {sorted(ALLOWED_PYTHON[room])}")
    assert not wrong, "\n".join(wrong)
    assert used == ALLOWED_PYTHON, "an arrow that nothing needs any more is to be taken out of ALLOWED_PYTHON"
    rooms = list(ALLOWED_PYTHON)
    assert not [(room, below) for at, room in enumerate(rooms) for below in ALLOWED_PYTHON[room] - set(rooms[:at])]


def test_no_folder_is_too_large_to_look_over() -> None:
    files = {path.relative_to(ROOT) for top in ("python/zeropg", "tests") for path in (ROOT / top).rglob("*.py")}
    counts = Counter(folder(path) for path in [*sources(), *files] if path.name != "__init__.py")
    assert not {name: count for name, count in counts.items() if count > MOST_FILES}


def test_no_class_declares_too_much_to_look_over() -> None:
    counts = {
        (path, name): count
        for path in sources()
        for name, count in members((ROOT / path).read_text(), str(path)).items()
    }
    # What c10d::Backend has for each operation, ProcessGroupZero has too.
    assert counts.pop((Path("backend/process_group/process_group.h"), "ProcessGroupZero")) > MOST_MEMBERS
    wrong = [
        f"{path}: {name} declares {count} members, at most {MOST_MEMBERS}: make a class of one of its concepts"
        for (path, name), count in counts.items()
        if count > MOST_MEMBERS
    ]
    assert not wrong, "\n".join(wrong)


def test_members_are_counted_as_a_reader_counts_them() -> None:
    code = """
    // class Comment { int a; };
    #define MACRO { \\
      {
    namespace outer {
    class Announced;
    template <typename T, int n = (3)>
    class Box final : public std::vector<std::pair<T, int>>, private Other {
     public:
      explicit Box(int a) : a_{a}, b_(a) {}
      Box(const Box&) = delete;
      ~Box() override;
      bool operator<(const Box& other) const { return a_ < other.a_; }
      bool operator==(const Box&) const = default;
      struct Inner {
        int x = 0, y = 0;
        enum Kind : uint8_t { kOne, kTwo };
      };
      using Map = std::map<int, T>;
      static_assert(sizeof(T) > 1, "}");

     private:
      friend class Announced;
      template <typename U>
      friend class Box;
      class Hidden;
      std::function<void(int, int)> call_;
      alignas(64) std::atomic<int64_t> bytes_{int64_t{4} << 20};
      int a_{0}, b_ = 1;  // }
      [[maybe_unused]] int first_ = f(1, 2), second_ = n < 3, third_ = 1'000;
      const char* const text_ = R"end(class Text { )" int a; })end", *more_ = R"(\\)";
      char open_ = '{';
    };
    template <int n = int{3}>
    class Braced : Base<int{3}> {
      int x;
    };
    template <typename T>
      requires C<T> && (sizeof(T) > 1)
    class Constrained {
      int x, y;
    };
    template <typename T>
      requires requires(T t) { t.x(); }
    class Required {
      int x;
    };
    template <template <class> class Kind, class... Types>
    class Box<Kind<Types...>> {};
    class Box<int>::Hidden {
      void f(class Elaborated x, struct Announced* y);
      enum class Scoped { kOne, kTwo } scoped_;
    };
    void function() {
      struct Local {
        int x;
      };
      run([] { union { int a; float b; } both; });
    }
    }  // namespace outer
    """
    assert members(code, "x.h") == {
        "Box": 17,
        "Box::Inner": 3,
        "Braced": 1,
        "Constrained": 2,
        "Required": 1,
        "Box::Hidden": 3,
        "Local": 1,
        "(unnamed)": 2,
    }


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("class X { int a; ", "x.h: a { is not closed"),
        ("class X { int a; }; }", "x.h: a } closes nothing"),
        ("class X { int a = (1; };", "x.h: a } closes nothing"),
        ("class X { int a; MACRO };", "x.h: X: no declaration ends with 'MACRO'"),
    ],
)
def test_what_cannot_be_counted_is_an_error(code: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        members(code, "x.h")


def test_a_wire_is_its_source_a_line_of_the_registry_its_suites_and_a_row() -> None:
    network = ROOT / "backend" / "transport" / "network"
    names = {path.name.removesuffix("_wire.h") for path in network.glob("*_wire.h")}
    registry = (network / "registry.cpp").read_text()
    assert set(re.findall(r'^    \{"(\w+)", ', registry, re.MULTILINE)) == names
    readme = (network.parent / "README.md").read_text()
    assert set(re.findall(r"^\| `network/(\w+)_wire`", readme, re.MULTILINE)) == names
    tests = {path.name.removesuffix("_wire_test.cpp") for path in (ROOT / "tests").rglob("*_wire_test.cpp")}
    assert tests == names
    headers = {f'"backend/transport/network/{name}_wire.h"' for name in names}
    users = {path for path in sources() if headers & set(includes(path))}
    assert users == {
        (network / f"{name}.cpp").relative_to(ROOT) for name in ["registry", *(f"{n}_wire" for n in names)]
    }


def test_an_algorithm_is_a_line_of_the_registry_and_a_row_that_names_its_file() -> None:
    collectives = ROOT / "backend" / "collectives"
    registry = (collectives / "select" / "registry.cpp").read_text()
    readme = (collectives / "README.md").read_text()
    files = dict(re.findall(r"^\| `(\w+)` \| `(\w+\.cpp)` \|", readme, re.MULTILINE))
    assert set(re.findall(r'^    \{"(\w+)", OpKind::', registry, re.MULTILINE)) == set(files)
    sources = {path.name: path.read_text() for path in (collectives / "algorithms").rglob("*.cpp")}
    assert not {name: file for name, file in files.items() if f"Schedule plan_{name}(" not in sources[file]}


def test_schedules_and_codecs_include_no_torch() -> None:
    pure = [path for path in sources() if folder(path) in WITHOUT_TORCH]
    wrong = [f"{path}: {name}" for path in pure for name in includes(path) if TORCH.match(name)]
    assert not wrong, "plain C++:\n" + "\n".join(wrong)


def test_only_bindings_include_python() -> None:
    core = [path for path in sources() if folder(path) != "python/bindings"]
    wrong = [f"{path}: {name}" for path in core for name in includes(path) if PYTHON.match(name)]
    assert not wrong, "the core library does not link libtorch_python:\n" + "\n".join(wrong)


def test_no_folder_for_leftovers() -> None:
    wrong = [path for top in ROOM_FOLDERS for path in (ROOT / top).rglob("*/") if path.name in FORBIDDEN_FOLDERS]
    assert not [path for path in wrong if path != ROOT / DEEPSPEEDS_OWN]


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
