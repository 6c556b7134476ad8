"""The installed package: found by name without an import, and clear when it does not fit the torch that is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.util import find_spec
from pathlib import Path

import pytest

ONE_RANK = """
import sys, torch, torch.distributed as dist
assert "zeropg" not in sys.modules, "import torch loaded the package"
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [1.0, 1.0, 1.0]
dist.destroy_process_group()
"""


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | env, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def package() -> Path:
    """The folder of zeropg, wherever it comes from."""
    spec = find_spec("zeropg")
    if spec is None or spec.origin is None or not list(Path(spec.origin).parent.glob("_C*.so")):
        pytest.skip("zeropg is neither installed nor on PYTHONPATH")
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def installed(package: Path) -> Path:
    try:
        distribution("zeropg")
    except PackageNotFoundError:
        pytest.skip("zeropg is not installed (`make test` installs the wheel): entry points need an installation")
    return package


@pytest.mark.parametrize("backend", ["zeropg", "cpu:zeropg,cuda:gloo"])
def test_init_process_group_finds_the_backend_without_an_import(installed: Path, backend: str) -> None:
    result = run(ONE_RANK.format(backend=backend))
    assert result.returncode == 0, result.stderr


def test_wheel_names_the_torch_that_it_was_built_for(installed: Path) -> None:
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    assert distribution("zeropg").version.endswith(f"+torch{minor}")
    assert f"torch=={minor}.*" in (requires("zeropg") or [])


def test_library_paths_are_relative(package: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    for library in package.glob("*.so"):
        dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
        assert len(paths) == 1, dynamic
        assert "$ORIGIN/../torch/lib" in paths[0].split(":")
        assert all(path.startswith("$ORIGIN") for path in paths[0].split(":"))


def copy_built_for(package: Path, folder: Path, torch_version: str) -> str:
    shutil.copytree(package, folder / "zeropg", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(package.parent / "_zeropg_register.py", folder)
    (folder / "zeropg" / "_built_for.py").write_text(f'TORCH_VERSION = "{torch_version}"\n')
    return str(folder)


def test_import_names_both_versions_when_torch_does_not_fit(package: Path, tmp_path: Path) -> None:
    import torch

    result = run("import zeropg", PYTHONPATH=copy_built_for(package, tmp_path, "2.3.1"))
    assert result.returncode == 1
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("ImportError: zeropg was built for torch 2.3.1, but torch " + torch.__version__)
    assert "reinstall zeropg" in error


def test_import_torch_survives_a_core_that_does_not_fit(package: Path, tmp_path: Path) -> None:
    program = "import torch, _zeropg_register; _zeropg_register.autoload(); print(torch.ones(1).sum())"
    result = run(program, PYTHONPATH=copy_built_for(package, tmp_path, "2.3.1"))
    assert result.returncode == 0 and "tensor(1.)" in result.stdout, result.stderr


def test_import_says_so_when_there_is_no_core_for_this_python(package: Path, tmp_path: Path) -> None:
    import torch

    result = run("import zeropg", PYTHONPATH=copy_built_for(package, tmp_path, torch.__version__))
    assert f"no compiled core for Python {sys.version_info.major}.{sys.version_info.minor}" in result.stderr


def test_import_from_a_source_folder_says_how_to_build(package: Path, tmp_path: Path) -> None:
    path = copy_built_for(package, tmp_path, "any")
    (tmp_path / "zeropg" / "_built_for.py").unlink()
    assert "run `make build`" in run("import zeropg", PYTHONPATH=path).stderr
