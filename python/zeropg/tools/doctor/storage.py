"""What checkpoints and offload to files need of a folder: space, direct I/O, and whether io_uring is allowed."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zeropg.tools import machine
from zeropg.tools.doctor.finding import Finding
from zeropg.tools.quantities import size

_BLOCK = 4096
_IO_URING_SETUP = 425  # the same number on every architecture
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "overlay")


def check(folder: Path) -> Iterator[Finding]:
    """`folder`: where files would lie; it must exist."""
    yield _space(folder)
    yield _device(folder)
    yield _direct(folder)
    yield _io_uring()


def _space(folder: Path) -> Finding:
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return Finding("storage", "no", f"{folder}: {error.strerror}", "give an existing folder with --path")
    free = status.f_bavail * status.f_frsize
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding("storage", "no", f"{folder}: no permission to write", "give another folder with --path")
    return Finding("storage", "ok", f"{folder}: {size(free)} free, {_filesystem(folder)}")


def _device(folder: Path) -> Finding:
    try:
        number = os.stat(folder).st_dev
    except OSError as error:
        return Finding("device", "no", f"{folder}: {error.strerror}")
    if _filesystem(folder) in _MEMORY_FILESYSTEMS[:2]:
        return Finding(
            "device",
            "warn",
            f"{folder} is memory ({_filesystem(folder)}): offload there saves none",
            "--path on a disk",
        )
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        return Finding("device", "ok", f"{_filesystem(folder)}, not a block device of this machine")
    name = link.resolve().name
    whole = link.resolve().parent.name if (link / "partition").exists() else name
    rotates = machine.read_text(Path(f"/sys/block/{whole}/queue/rotational"))
    if rotates == "1" and not whole.startswith(("vd", "xvd")):  # hypervisors say "rotational" of anything
        return Finding("device", "warn", f"{whole} rotates: offload would be a hundred times slower than on NVMe")
    kind = "NVMe" if whole.startswith("nvme") else "virtual" if whole.startswith(("vd", "xvd")) else "block device"
    return Finding("device", "ok", f"{whole}: {kind}")


def _direct(folder: Path) -> Finding:
    """Writes and reads one block past the page cache."""
    file = None
    try:
        file, name = tempfile.mkstemp(prefix=".zeropg-doctor-", dir=folder)
        os.unlink(name)
        direct = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _BLOCK) as page:
                page.write(b"z" * _BLOCK)
                written = os.pwrite(direct, page, 0)
                read = os.preadv(direct, [page], 0)
        finally:
            os.close(direct)
    except OSError as error:
        why = "the file system has no O_DIRECT" if error.errno == errno.EINVAL else error.strerror
        return Finding(
            "O_DIRECT",
            "no",
            f"{folder}: {why}; files go through the page cache, several times slower",
            "--path elsewhere",
        )
    finally:
        if file is not None:
            os.close(file)
    if (written, read) != (_BLOCK, _BLOCK):
        return Finding("O_DIRECT", "no", f"{folder}: wrote {written} and read {read} of {_BLOCK} bytes")
    return Finding("O_DIRECT", "ok", f"a block was written and read past the page cache in {folder}")


def _io_uring() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    ring = libc.syscall(_IO_URING_SETUP, 4, parameters)
    if ring >= 0:
        os.close(ring)
        return Finding("io_uring", "ok", "allowed (threads with O_DIRECT are as fast on one disk)")
    number = ctypes.get_errno()
    disabled = machine.read_text(Path("/proc/sys/kernel/io_uring_disabled"))
    why = f"sysctl kernel.io_uring_disabled={disabled}" if disabled in ("1", "2") else os.strerror(number)
    return Finding("io_uring", "warn", f"{why}; file I/O uses threads, which are as fast on one disk")


def _filesystem(folder: Path) -> str:
    """The type of the mount that holds `folder`."""
    path, best, kind = str(folder.resolve()), "", "?"
    for line in machine.read_text(Path("/proc/self/mountinfo")).splitlines():
        found = re.match(r"\S+ \S+ \S+ \S+ (\S+) .* - (\S+) ", line)
        if found and len(found[1]) >= len(best) and (path + "/").startswith(found[1].rstrip("/") + "/"):
            best, kind = found[1], found[2]
    return kind
