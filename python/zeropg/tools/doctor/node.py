"""What ranks of one node need: processors, memory, and the ways in which processes share memory."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from zeropg._native import _C
from zeropg.tools import machine
from zeropg.tools.doctor.finding import Finding
from zeropg.tools.quantities import size

_TYPICAL_SHM = 64 << 20  # Docker's default for /dev/shm
_WORD = b"zeropg!!"
_CHILD_SECONDS = 20.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def check(ranks: int) -> Iterator[Finding]:
    """`ranks`: how many processes are meant to run here."""
    yield _cpus(ranks)
    yield _load()
    yield _memory()
    yield _numa()
    yield _host_id()
    yield _domain_id()
    yield _shared_memory()
    yield _dev_shm()
    yield _cross_memory_attach()
    yield _locked_memory()
    yield _huge_pages("huge pages", "enabled", "touching fresh memory is two to three times slower", "madvise")
    # Groups share memory files, for which a switch of their own holds; kernels come with "never".
    yield _huge_pages("shared huge pages", "shmem_enabled", "touching fresh shared memory is slower", "advise")
    yield _open_files()


def _cpus(ranks: int) -> Finding:
    allowed, limit = len(os.sched_getaffinity(0)), machine.cgroup_cpu_limit()
    words = f"{machine.cpu_model()}; {allowed} of {os.cpu_count()} CPUs by affinity"
    words += f", {limit:g} by cgroup" if limit is not None else ", no cgroup limit"
    usable = machine.usable_cpus()
    if ranks > usable:
        return Finding(
            "CPUs",
            "warn",
            f"{words}: fewer than {ranks} ranks, so waiting ranks give up their CPU instead of spinning (slower)",
            f"start at most {max(1, int(usable))} ranks here, or allow more CPUs (taskset, docker --cpus)",
        )
    return Finding("CPUs", "ok", f"{words}; enough for {ranks} ranks")


def _load() -> Finding:
    others = machine.others_load_now(0.5)
    words = f"others keep {others:.2f} CPUs busy; load average {os.getloadavg()[0]:.2f}"
    if others > 0.25 * machine.usable_cpus():
        return Finding(
            "load", "warn", words, "expect slower and noisier steps; python -m zeropg bench refuses to compare"
        )
    return Finding("load", "ok", words)


def _memory() -> Finding:
    total, available = machine.memory_bytes()
    limit = machine.cgroup_memory_limit()
    words = f"{size(available)} of {size(total)} available"
    if limit is not None and limit < total:
        words += f"; the cgroup allows {size(limit)}"
    return Finding("memory", "ok", words)


def _numa() -> Finding:
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) <= 1:
        return Finding("NUMA", "ok", "one node")
    return Finding(
        "NUMA",
        "ok",
        f"{len(nodes)} nodes",
        "bind each rank to the CPUs of one node (torchrun --numa-binding, or numactl), so that its memory is near",
    )


def _host_id() -> Finding:
    given = os.environ.get("ZEROPG_HOST_ID")
    if given:
        return Finding("host id", "ok", f"{given!r} by ZEROPG_HOST_ID: ranks with the same one must share memory")
    return Finding("host id", "ok", f"{_C.probe_host_id()} (boot, network and user namespace)")


def _domain_id() -> Finding:
    """What collectives of more than 16 ranks of a node go by, where every rank has one."""
    given = os.environ.get("ZEROPG_DOMAIN_ID")
    if given:
        return Finding(
            "domain", "ok", f"{given!r} by ZEROPG_DOMAIN_ID: ranks with the same one share a cache or memory"
        )
    found = _C.probe_domain_id()
    if found:
        return Finding("domain", "ok", f"{found}: ranks that are bound to it are near each other")
    return Finding("domain", "ok", "none: the CPUs that this process may run on share no L3 cache and no NUMA node")


def _shared_memory() -> Finding:
    """A sealed memfd that changes hands over an abstract socket: what the group's arena is made of."""
    try:
        file = os.memfd_create("zeropg-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Finding(
            "shared memory", "no", f"memfd_create: {error.strerror}", "allow memfd_create in the seccomp profile"
        )
    try:
        os.posix_fallocate(file, 0, 1 << 20)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        _hand_over(file)
    except OSError as error:
        return Finding(
            "shared memory",
            "no",
            f"sealed memfd over an abstract UNIX socket: {error.strerror}",
            "give the job memory, and a seccomp profile that allows AF_UNIX sockets and file seals",
        )
    finally:
        os.close(file)
    return Finding("shared memory", "ok", "sealed memfd over abstract UNIX sockets; /dev/shm is not needed for it")


def _hand_over(file: int) -> None:
    """Sends a descriptor through an abstract UNIX socket and maps nothing of it. Raises OSError."""
    name = "\0zeropg-doctor-" + os.urandom(8).hex()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client,
    ):
        listener.bind(name)
        listener.listen(1)
        client.connect(name)
        server, _ = listener.accept()
        with server:
            socket.send_fds(client, [b"x"], [file])
            _, received, _, _ = socket.recv_fds(server, 1, 1)
            for descriptor in received:
                os.close(descriptor)


def _dev_shm() -> Finding:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", "warn", f"{error.strerror}; torch's DataLoader workers need it, zeropg does not")
    free = status.f_bavail * status.f_frsize
    if status.f_blocks * status.f_frsize <= _TYPICAL_SHM:
        return Finding(
            "/dev/shm",
            "warn",
            f"{size(free)} free: torch's DataLoader workers may die of SIGBUS (zeropg does not use it)",
            "docker run --shm-size=8g",
        )
    return Finding("/dev/shm", "ok", f"{size(free)} free (for DataLoader workers; zeropg does not use it)")


def _cross_memory_attach() -> Finding:
    """A child really reads eight bytes of its parent: as between ranks, where none is the other's descendant."""
    word = ctypes.create_string_buffer(_WORD)
    program = (
        "import ctypes, os, sys\n"
        "class V(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "b = ctypes.create_string_buffer(8)\n"
        "mine, theirs = V(ctypes.addressof(b), 8), V(int(sys.argv[2]), 8)\n"
        "n = libc.process_vm_readv(int(sys.argv[1]), ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)\n"
        "print(b.raw.decode() if n == 8 else os.strerror(ctypes.get_errno()))\n"
    )
    try:
        run = subprocess.run(
            [sys.executable, "-S", "-c", program, str(os.getpid()), str(ctypes.addressof(word))],
            capture_output=True,
            text=True,
            timeout=_CHILD_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"no answer within {_CHILD_SECONDS:g} s"
        return Finding(
            "CMA",
            "warn",
            f"not known, a child of this process was to read its memory: {why}",
            "look at what keeps this machine from running a small Python program, then try again",
        )
    answer = run.stdout.strip()
    if answer == _WORD.decode():
        return Finding("CMA", "ok", "process_vm_readv between processes works: large messages are copied once")
    scope = machine.read_text(Path("/proc/sys/kernel/yama/ptrace_scope"))
    return Finding(
        "CMA",
        "warn",
        f"process_vm_readv: {answer or 'failed'}"
        + (f" (yama ptrace_scope {scope})" if scope else "")
        + ": large messages between ranks of this node are copied twice",
        "allow it (docker --cap-add SYS_PTRACE, sysctl kernel.yama.ptrace_scope=0), or BackendOptions(cma=False)",
    )


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", "ok", "unlimited")
    return Finding(
        "memlock",
        "warn",
        f"{size(soft)}: too little for RDMA and for pinned host memory beside a GPU; nothing else locks memory",
        "ulimit -l unlimited (docker --ulimit memlock=-1) where there is RDMA or a GPU",
    )


def _huge_pages(topic: str, file: str, cost: str, wanted: str) -> Finding:
    path = _HUGE_PAGES / file
    chosen = re.search(r"\[(\w+)\]", machine.read_text(path))
    if chosen is None:
        return Finding(topic, "warn", f"no transparent huge pages in this kernel; {cost}")
    if chosen[1] in ("never", "deny"):
        return Finding(
            topic,
            "warn",
            f"transparent huge pages are off ({chosen[1]}); {cost}",
            f"echo {wanted} > {path}",
        )
    return Finding(topic, "ok", f"transparent: {chosen[1]}")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        return Finding("open files", "warn", f"{soft}: little for large groups", f"ulimit -n {hard}")
    return Finding("open files", "ok", f"{soft}")
