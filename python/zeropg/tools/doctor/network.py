"""What ranks on several nodes need: addresses that others can reach, ports, a secret."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from zeropg._native import _C
from zeropg.tools import machine
from zeropg.tools.doctor.finding import Finding

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_DEFAULT_PORT = 29500  # of torchrun without --standalone


def check() -> Iterator[Finding]:
    """Interfaces, the ones that gloo and UCX would take, the rendezvous port, the secret."""
    addresses = _addresses()
    yield _interfaces(addresses)
    yield _zeropg(addresses)
    yield _gloo(addresses)
    yield _ucx_devices(addresses)
    yield _port()
    yield _secret()


def _addresses() -> dict[str, str | None]:
    """Interfaces that are up, with their IPv4 address."""
    found: dict[str, str | None] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            flags = machine.read_text(Path(f"/sys/class/net/{name}/flags"))
            if flags and not int(flags, 16) & 1:
                continue
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name[:15].encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:
                found[name] = None
    return found


def _interfaces(addresses: dict[str, str | None]) -> Finding:
    words = []
    for name, address in addresses.items():
        speed = machine.read_text(Path(f"/sys/class/net/{name}/speed"))
        words.append(f"{name} {address or 'without IPv4'}" + (f" ({speed} Mb/s)" if speed.isdigit() else ""))
    if all(name == "lo" for name in addresses):
        return Finding("network", "warn", f"only {', '.join(words) or 'nothing'}: ranks of this node alone")
    return Finding("network", "ok", ", ".join(words))


def _zeropg(addresses: dict[str, str | None]) -> Finding:
    """zeropg's TCP takes the interfaces that ZEROPG_INTERFACE allows, else all but loopback."""
    chosen = os.environ.get("ZEROPG_INTERFACE")
    usable = [name for name in addresses if name != "lo"]
    if not chosen:
        words = (
            f"{', '.join(usable)}: whatever other nodes reach" if usable else "nothing: this machine has only loopback"
        )
        return Finding("zeropg would use", "ok", f"{words} (TCP; UCX where every rank has RDMA)")
    advice = f"one or more of {', '.join(usable) or 'none'}"
    try:
        allowed = dict.fromkeys(name for name, _ in _C.interface_addresses(chosen))
    except ValueError as error:
        return Finding("zeropg would use", "no", str(error), advice)
    if not allowed:
        return Finding("zeropg would use", "no", f"ZEROPG_INTERFACE={chosen} allows no interface that is up", advice)
    return Finding("zeropg would use", "ok", f"{', '.join(allowed)} (ZEROPG_INTERFACE)")


def _gloo(addresses: dict[str, str | None]) -> Finding:
    """gloo takes GLOO_SOCKET_IFNAME, else what this machine's own name resolves to."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        missing = [name for name in chosen.split(",") if name not in addresses]
        if missing:
            return Finding(
                "gloo would use",
                "no",
                f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which is not an interface that is up",
                f"one of {', '.join(addresses)}",
            )
        return Finding("gloo would use", "ok", f"{chosen} (GLOO_SOCKET_IFNAME)")
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding(
            "gloo would use",
            "warn",
            f"the loopback interface: the host name {name!r} does not resolve ({error}); other nodes cannot reach it",
            "put the name into /etc/hosts with the right address, or set GLOO_SOCKET_IFNAME",
        )
    if address.startswith("127."):
        return Finding(
            "gloo would use",
            "warn",
            f"{address}: the host name {name!r} resolves to loopback; other nodes cannot reach it",
            "set GLOO_SOCKET_IFNAME to the interface between the nodes",
        )
    interface = next((key for key, value in addresses.items() if value == address), "no interface of this machine")
    state = "ok" if interface in addresses else "warn"
    return Finding("gloo would use", state, f"{interface}, {address} (this host's name)")  # type: ignore[arg-type]


def _ucx_devices(addresses: dict[str, str | None]) -> Finding:
    chosen = os.environ.get("UCX_NET_DEVICES")
    if chosen:
        return Finding("UCX would use", "ok", f"{chosen} (UCX_NET_DEVICES)")
    candidates = [name for name, address in addresses.items() if name != "lo" and address is not None]
    virtual = [name for name in candidates if name.startswith(("docker", "virbr", "br-", "veth", "cni", "flannel"))]
    if virtual and len(candidates) > len(virtual):
        return Finding(
            "UCX would use",
            "warn",
            f"any of {', '.join(candidates)}, by nominal speed; {', '.join(virtual)} may not lead to other nodes",
            "set UCX_NET_DEVICES to the interface between the nodes",
        )
    return Finding("UCX would use", "ok", ", ".join(candidates) or "nothing: no interface but loopback")


def _port() -> Finding:
    text = os.environ.get("MASTER_PORT", str(_DEFAULT_PORT))
    if not text.isdigit():
        return Finding("rendezvous port", "no", f"MASTER_PORT={text!r} is not a number")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(text)))
        except OSError as error:
            return Finding(
                "rendezvous port",
                "warn",
                f"{text}: {error.strerror}; another job may run here",
                "torchrun --standalone takes a free one; or choose another --master-port",
            )
    return Finding(
        "rendezvous port", "ok", f"{text} is free ({'MASTER_PORT' if 'MASTER_PORT' in os.environ else 'the default'})"
    )


def _secret() -> Finding:
    if os.environ.get("ZEROPG_SECRET"):
        return Finding("secret", "ok", "ZEROPG_SECRET is set (visible to this user's other processes; a file is not)")
    name = os.environ.get("ZEROPG_SECRET_FILE")
    if not name:
        return Finding(
            "secret",
            "warn",
            "none set: a random one goes through the rendezvous store, and keeps out only who cannot reach the store",
            "on a shared network: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE; ZEROPG_SECRET_FILE=FILE",
        )
    try:
        status = os.stat(name)
    except OSError as error:
        return Finding("secret", "no", f"ZEROPG_SECRET_FILE {name}: {error.strerror}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        return Finding("secret", "no", f"ZEROPG_SECRET_FILE {name} is open to other users", f"chmod 600 {name}")
    if status.st_size == 0:
        return Finding("secret", "no", f"ZEROPG_SECRET_FILE {name} is empty")
    return Finding("secret", "ok", f"ZEROPG_SECRET_FILE {name}")
