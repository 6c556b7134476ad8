"""What is built and what it found at load time."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import torch

from zeropg._built_for import TORCH_VERSION
from zeropg._native import _C
from zeropg.tools.doctor.finding import Finding


def check() -> Iterator[Finding]:
    """Versions, instruction sets, CUDA kernels, UCX. That the core loads at all has been checked by the import."""
    yield _package()
    yield Finding("torch", "ok", f"{torch.__version__}; zeropg was built for {TORCH_VERSION}")
    yield Finding("Python", "ok", f"{platform.python_version()} ({platform.python_implementation()})")
    yield _registration()
    yield _instruction_set()
    yield Finding("optimizers", "ok", f"fused kernels for {', '.join(_C.optimizer_names())}")
    if _C.built_with_cuda:
        yield Finding("CUDA kernels", "ok", f"compiled for CUDA {torch.version.cuda}")
    else:
        yield Finding(
            "CUDA kernels",
            "ok",
            "none compiled; CUDA tensors use NCCL and torch's own kernels"
            + (f" (torch is built for CUDA {torch.version.cuda})" if torch.version.cuda else " (torch is a CPU build)"),
        )
    yield _ucx()


def _package() -> Finding:
    folder = Path(__file__).resolve().parents[2]
    try:
        return Finding("zeropg", "ok", f"{version('zeropg')} in {folder}")
    except PackageNotFoundError:
        return Finding("zeropg", "ok", f"a build tree, not installed, with the sources in {folder}")


def _registration() -> Finding:
    groups = ("torch.distributed.backends", "torch.backends")  # which of them is read depends on torch's version
    if any(point.name == "zeropg" for group in groups for point in entry_points(group=group)):
        return Finding("entry point", "ok", 'init_process_group("zeropg") works without `import zeropg`')
    return Finding(
        "entry point",
        "warn",
        'none: a build tree is not installed, so init_process_group("zeropg") works only after `import zeropg`',
        "install the wheel: make wheel && pip install dist/zeropg-*.whl",
    )


def _instruction_set() -> Finding:
    usable = _C.reduction_instruction_sets()
    best = usable[-1]
    if best == "portable" and platform.machine() == "x86_64":
        return Finding(
            "SIMD", "warn", "portable code: this processor has no AVX2, so reductions are several times slower"
        )
    return Finding("SIMD", "ok", f"{best} (usable: {', '.join(usable)}); the same bits with each")


def _ucx() -> Finding:
    library = _ucx_library()
    if library is None:
        return Finding(
            "UCX",
            "warn",
            "no libucp.so.0: neither the wheel libucx nor the system has one; only needed between nodes",
            "pip install libucx-cu13 (TCP), or install your fabric's UCX (RDMA)",
        )
    transports = _ucx_transports(library)
    if transports is None:
        return Finding("UCX", "ok", f"{library}; ucx_info is not beside it, so its transports are unknown")
    rdma = sorted(set(transports) & {"rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5", "srd"})
    detail = f"{library}: {', '.join(transports)}"
    if rdma or not Path("/sys/class/infiniband").is_dir():
        return Finding("UCX", "ok", detail)
    return Finding(
        "UCX",
        "warn",
        f"{detail}; this machine has InfiniBand or RoCE, but this UCX was built without verbs",
        "put the fabric's own libucp.so.0 (MOFED, HPC-X) on LD_LIBRARY_PATH",
    )


def _ucx_library() -> str | None:
    specification = importlib.util.find_spec("libucx")
    if specification is not None and specification.origin is not None:
        wheel = Path(specification.origin).parent / "lib" / "libucp.so.0"
        if wheel.exists():
            return str(wheel)
    return ctypes.util.find_library("ucp")


def _ucx_transports(library: str) -> list[str] | None:
    """Asked of ucx_info, in a process of its own: loading UCX here would leave its signal handlers behind."""
    folder = Path(library).parent
    program = folder.parent / "bin" / "ucx_info"
    environment = os.environ | {"LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    try:
        run = subprocess.run(
            [program if program.exists() else "ucx_info", "-d"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.findall(r"^#\s+Transport:\s+(\S+)", run.stdout, re.MULTILINE)
    return list(dict.fromkeys(found)) or None
