"""Hosts and their slots: from a hostfile, or from slurm, cut to what --include, --exclude and the counts leave."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_LINE = re.compile(r"(\S+)\s+slots=(\d+)\s*(#.*)?")
_PLACE = re.compile(r"(?:(?P<user>[^@]+)@)?(?:(?P<name>[^@:]+|\[[^@\]]+\])(?::(?P<port>\d+))?|(?P<address>[^@]*))")


@dataclass(frozen=True)
class Host:
    """A host and its slots, one per rank; on a host with GPUs the number of a slot is a GPU's.

    user, port: for ssh; "" and None: its own choice.
    """

    name: str
    slots: tuple[int, ...]
    user: str = ""
    port: int | None = None


def read_hostfile(path: Path) -> list[Host]:
    """Returns the hosts of a file in DeepSpeed's format: a line `NAME slots=N` each, and comments after `#`.

    A name may be written as for ssh, USER@NAME, and with a port, USER@NAME:PORT or [ADDRESS]:PORT. Raises ValueError
    with the line, where one is something else, where a host is named twice, and without any host.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        found = _LINE.fullmatch(text)
        if found is None or int(found[2]) < 1:
            raise ValueError(f"{path}, line {number}: {text!r}; expected NAME slots=N, with N at least 1")
        place = _PLACE.fullmatch(found[1])
        name = (place["name"] or place["address"]).strip("[]") if place is not None else ""
        if place is None or not name:
            raise ValueError(f"{path}, line {number}: {found[1]!r}; expected NAME, USER@NAME or USER@NAME:PORT")
        if name in hosts:
            raise ValueError(f"{path}, line {number}: {name} is there twice; give all its slots in one line")
        if found[1].startswith("-") or name.startswith("-"):
            raise ValueError(f"{path}, line {number}: {found[1]!r} is no name of a host, but would be an option of ssh")
        port = int(place["port"]) if place["port"] else None
        hosts[name] = Host(name, tuple(range(int(found[2]))), place["user"] or "", port)
    if not hosts:
        raise ValueError(f"{path} names no host; expected lines like: worker-0 slots=4")
    return list(hosts.values())


def select(hosts: Sequence[Host], include: str, exclude: str) -> list[Host]:
    """Returns the hosts that DeepSpeed's --include keeps, or that --exclude leaves, in the order of the hostfile.

    Both are `NAME[:SLOT,SLOT...]`, joined by `@`; a name alone means all slots of the host. Raises ValueError where
    both are given, where a host or slot is not there, and where nothing is left.
    """
    if include and exclude:
        raise ValueError("--include and --exclude are both given; expected one of them")
    if not include and not exclude:
        return list(hosts)
    named = _filter(hosts, include or exclude, "--include" if include else "--exclude")
    kept = []
    for host in hosts:
        slots = named.get(host.name, frozenset())
        kept.append(replace(host, slots=tuple(slot for slot in host.slots if (slot in slots) == bool(include))))
    left = [host for host in kept if host.slots]
    if not left:
        raise ValueError(f"--exclude {exclude} leaves no slot of any host")
    return left


def first(hosts: Sequence[Host], num_nodes: int | None, num_slots: int | None) -> list[Host]:
    """Returns the first `num_nodes` hosts, each with its first `num_slots` slots; None: all of them.

    Raises ValueError where there are fewer.
    """
    if num_nodes is not None and num_nodes > len(hosts):
        names = ", ".join(host.name for host in hosts)
        raise ValueError(f"--num_nodes is {num_nodes}, but there are only {len(hosts)} hosts: {names}")
    chosen = list(hosts[:num_nodes])
    for host in chosen:
        if num_slots is not None and num_slots > len(host.slots):
            raise ValueError(f"--num_gpus is {num_slots}, but {host.name} has only {len(host.slots)} slots")
    return [replace(host, slots=host.slots[:num_slots]) for host in chosen]


def _filter(hosts: Sequence[Host], text: str, option: str) -> dict[str, frozenset[int]]:
    """The slots that a filter names, by host."""
    known = {host.name: host for host in hosts}
    named: dict[str, frozenset[int]] = {}
    for part in text.split("@"):
        name, colon, list_of_slots = part.strip().partition(":")
        if name not in known:
            raise ValueError(f"{option} names the host {name!r}; there is {', '.join(known)}")
        slots = known[name].slots
        if colon:
            if not re.fullmatch(r"\d+(,\d+)*", list_of_slots):
                raise ValueError(f"{option} has {part!r}; expected NAME, or NAME:SLOT,SLOT like {name}:0,2")
            asked = tuple(int(slot) for slot in list_of_slots.split(","))
            absent = [slot for slot in asked if slot not in slots]
            if absent:
                raise ValueError(f"{option} names slot {absent[0]} of {name}, which has {_range(slots)}")
            slots = asked
        named[name] = named.get(name, frozenset()) | frozenset(slots)
    return named


def _range(slots: Sequence[int]) -> str:
    return f"slots 0 to {slots[-1]}" if len(slots) > 1 else "slot 0 alone"
