"""From a file, a text in base64 or a dictionary to a dictionary."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any


def load(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration as a dictionary of its own."""
    if isinstance(config, dict):
        return copy.deepcopy(config)
    loaded: dict[str, Any] = json.loads(Path(config).read_text())
    return loaded
