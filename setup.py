"""Runs CMake in the persistent folder build/torch-<version> and packs the result; the rest is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
TORCH = version("torch").split("+")[0]
TORCH_MINOR = ".".join(TORCH.split(".")[:2])


class CMakeBuild(build_ext):
    def run(self) -> None:
        build = ROOT / "build" / f"torch-{TORCH}"
        jobs = str(len(os.sched_getaffinity(0)))
        python = f"-DPython3_EXECUTABLE={sys.executable}"
        subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", python], check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel", jobs, "--target", "zeropg", "_C"], check=True)
        subprocess.run(["cmake", "--install", str(build), "--prefix", str(Path(self.build_lib).resolve())], check=True)


# Python files deleted since the last build would otherwise be packed again.
staging = ROOT / "build" / "wheel"
shutil.rmtree(staging, ignore_errors=True)
staging.mkdir(parents=True)

setup(
    version=f"0.1.0+torch{TORCH_MINOR}",  # c10d has no stable binary interface: one wheel per minor version of torch
    install_requires=[f"torch=={TORCH_MINOR}.*", "numpy", "pydantic>=2", "safetensors", "tqdm"],
    ext_modules=[Extension("zeropg._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    options={"build": {"build_base": str(staging)}, "egg_info": {"egg_base": str(staging)}},
)
