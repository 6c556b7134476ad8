"""Racks of nodes that need not exist: the topology file of `python -m zeropg simulate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zeropg._native import _C


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
    result = Racks([], [], [])
    for rack in _C.parse_racks(_as_json(file)):
        speed = rack.node_gbps or node_gbps
        first = len(result.node_gbps)
        result.nodes.append(list(range(first, first + rack.nodes)))
        result.node_gbps.extend([speed] * rack.nodes)
        result.uplink_gbps.append(rack.uplink_gbps or rack.nodes * speed)
    return result


def _as_json(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read: {error}") from None
    if text.lstrip().startswith("{"):
        return text
    try:
        import tomllib  # Python 3.11

        return json.dumps(tomllib.loads(text))
    except ImportError:
        raise ValueError("TOML needs Python 3.11; write JSON") from None
    except ValueError as error:
        raise ValueError(f"it is neither TOML nor JSON: {error}") from None
    except TypeError as error:  # dates
        raise ValueError(f"it holds what no topology file does: {error}") from None
