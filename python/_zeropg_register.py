"""Makes `init_process_group("zeropg")` work without `import zeropg`: torch calls in here through two entry points.

Note [A module beside the package]: importing `zeropg._anything` runs `zeropg/__init__.py`, which loads the core. On
torch 2.11 the entry point runs inside every `import torch`, also in data loader workers and in programs that never use
zeropg, and an exception there makes `import torch` itself fail. So this module stands outside the package, imports
nothing at top level and never loads the core before a process group is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend


def register() -> None:
    """Registers the backend name with torch.distributed. Cheap; a second call does nothing."""
    import torch.distributed as dist

    if "ZEROPG" not in dist.Backend._plugins:
        dist.Backend.register_backend("zeropg", _create_backend, extended_api=True, devices=["cpu", "cuda"])


def autoload() -> None:
    """Entry point `torch.backends`, called at the end of `import torch`: registers where torch has no lazier way."""
    try:
        import torch.distributed as dist

        # torch 2.15 looks the name up in `torch.distributed.backends` when it is first used.
        if dist.is_available() and not hasattr(dist.Backend, "_ensure_backend_registered"):
            register()
    except Exception as error:  # whatever it is, `import torch` must go on
        import warnings

        warnings.warn(f"zeropg could not register itself with torch.distributed: {error!r}", stacklevel=2)


def _create_backend(distributed_backend_options: Any, pg_options: Any) -> Backend:
    from zeropg.backend import create_backend

    backend: Backend = create_backend(distributed_backend_options, pg_options)
    return backend
