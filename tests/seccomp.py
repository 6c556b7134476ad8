"""Forbids system calls in this process, as containers and service managers do."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050000 | errno.EPERM, 0x7FFF0000

PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}.get(platform.machine(), -1)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def forbid(system_call: int) -> None:
    """Makes the system call of this number fail with EPERM, in this process and its children, for ever."""
    steps = [
        (_LOAD_WORD, 0, 0, 0),  # the number
        (_JUMP_IF_EQUAL, 0, 1, system_call),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
