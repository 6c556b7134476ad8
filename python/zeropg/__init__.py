"""A topology-aware c10d backend and ZeRO sharding for PyTorch."""

from __future__ import annotations

import _zeropg_register
from zeropg import _native as _native  # checks versions before anything loads the core

_zeropg_register.register()
