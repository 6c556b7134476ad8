"""Logs what the core has to say to people, as warnings of the logger `zeropg`."""

from __future__ import annotations

import atexit
import logging

from zeropg._native import _C

LOGGER = logging.getLogger("zeropg")

_C.listen_to_notices(LOGGER.warning)
atexit.register(_C.listen_to_notices, None)
