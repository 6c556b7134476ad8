"""Racks of nodes that need not exist: the topology file of `python -m zeropg simulate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEYS = ("name", "pod", "hosts", "nodes", "node_gbps", "uplink_gbps")


@dataclass(frozen=True)
class Racks:
    """Nodes in the order of the file."""

    nodes: list[list[int]]  # of each rack
    node_gbps: list[float]  # of each node's link
    uplink_gbps: list[float]  # of each rack


def read_racks(file: Path, node_gbps: float) -> Racks:
    """The racks of `file`, TOML or JSON; `node_gbps` for nodes of which it says nothing.

    ValueError, with the rack's name, where it cannot be read or contradicts itself.
    """
    racks = _parse(file).get("racks")
    if not isinstance(racks, list) or not racks:
        raise ValueError('it has no racks; write [[racks]] with name = "a" and nodes = 8 for each')
    result = Racks([], [], [])
    names: set[str] = set()
    hosts: set[str] = set()
    for number, rack in enumerate(racks):
        if not isinstance(rack, dict):
            raise ValueError(f"rack {number} is {rack!r}, expected keys {', '.join(_KEYS)}")
        name = rack.get("name", f"number {number}")
        unknown = sorted(set(rack) - set(_KEYS))
        if unknown:
            raise ValueError(f"rack {name!r} has the key {unknown[0]!r}, expected some of {', '.join(_KEYS)}")
        if name in names:
            raise ValueError(f"two racks are called {name!r}; give each a name of its own")
        names.add(name)
        count = _node_count(rack, name, hosts)
        speed = _speed(rack, "node_gbps", node_gbps, name)
        first = len(result.node_gbps)
        result.nodes.append(list(range(first, first + count)))
        result.node_gbps.extend([speed] * count)
        result.uplink_gbps.append(_speed(rack, "uplink_gbps", count * speed, name))
    return result


def _parse(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read: {error}") from None
    try:
        if text.lstrip().startswith("{"):
            return dict(json.loads(text))
        import tomllib  # Python 3.11

        return tomllib.loads(text)
    except ImportError:
        raise ValueError("TOML needs Python 3.11; write JSON") from None
    except ValueError as error:
        raise ValueError(f"it is neither TOML nor JSON: {error}") from None


def _node_count(rack: dict[str, Any], name: str, hosts: set[str]) -> int:
    """`hosts`: those of the racks before, to which this one's are added."""
    if ("hosts" in rack) == ("nodes" in rack):
        raise ValueError(f"rack {name!r} needs either hosts, a list of names, or nodes, their number")
    if "nodes" in rack:
        count = rack["nodes"]
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"rack {name!r} has nodes = {count!r}, expected a number of at least 1")
        return count
    listed = rack["hosts"]
    if not isinstance(listed, list) or not listed or not all(isinstance(host, str) for host in listed):
        raise ValueError(f"rack {name!r} has hosts = {listed!r}, expected a list of names")
    for host in listed:
        if host in hosts:
            raise ValueError(f"host {host!r} is named twice; a host is in one rack")
        hosts.add(host)
    return len(listed)


def _speed(rack: dict[str, Any], key: str, default: float, name: str) -> float:
    speed = rack.get(key, default)
    if not isinstance(speed, int | float) or isinstance(speed, bool) or not 0 < speed < float("inf"):
        raise ValueError(f"rack {name!r} has {key} = {speed!r}, expected a positive number of 1e9 bytes/s")
    return float(speed)
