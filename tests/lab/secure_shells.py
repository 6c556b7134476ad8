"""sshd on every host of a lab, and an `ssh` that they let in; their keys and settings are the test's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from zeropg.tools.lab.lab import Lab

_SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
_SSH = shutil.which("ssh")

_SERVER = """
HostKey "{folder}/host_key"
AuthorizedKeysFile "{folder}/key.pub"
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
_CLIENT = """
Host *
IdentityFile "{folder}/key"
IdentitiesOnly yes
UserKnownHostsFile "{folder}/known_hosts"
GlobalKnownHostsFile /dev/null
"""
# /run and root's lock are this host's own: it has mounts of its own.
_START = """
mount -t tmpfs tmpfs /run && mkdir /run/sshd
sed 's/^root:[^:]*/root:*/' /etc/shadow > /run/shadow && mount --bind /run/shadow /etc/shadow
exec {sshd} -D -e -p {port} -f '{folder}/sshd_config'
"""


def missing_sshd() -> str | None:
    """Why hosts cannot be reached by ssh; None where they can."""
    if _SSHD is None or _SSH is None:
        return "no ssh and sshd (Debian: openssh-server)"
    return None if os.geteuid() == 0 else "sshd needs root to let somebody in"


@contextlib.contextmanager
def secure_shells(lab: Lab, folder: Path, port: int) -> Iterator[Path]:
    """sshd at `port` of every host of `lab`. Returns a folder for PATH with the `ssh` that they let in.

    folder: gets keys, `config` and `known_hosts`, which ssh reads anew each time, and what sshd says.
    """
    for name in ("host_key", "key", "wrong_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=60)
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    (folder / "config").write_text(_CLIENT.format(folder=folder))
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"[{host.name}]:{port} {key}\n" for host in lab.hosts))
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\nexec {_SSH} -F '{folder}/config' \"$@\"\n")
    ssh.chmod(0o755)
    start = _START.format(sshd=_SSHD, port=port, folder=folder)
    with contextlib.ExitStack() as stack:
        for host in lab.hosts:
            log = stack.enter_context((folder / f"{host.name}.log").open("w"))
            command = [*host.enter(), "env", "-i", f"PATH={os.environ['PATH']}", "sh", "-ec", start]
            # It ends with its host.
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 30
        while not all(lab.listening(index) for index in range(len(lab.hosts))):
            said = "".join((folder / f"{host.name}.log").read_text() for host in lab.hosts)
            assert time.monotonic() < deadline, f"sshd does not start: {said}"
            time.sleep(0.02)
        yield ssh.parent
