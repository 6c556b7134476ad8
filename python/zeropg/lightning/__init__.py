"""Lightning over zeropg: `ZeroPGStrategy`, for `lightning.Trainer(strategy=...)`."""

try:
    import lightning as _lightning  # noqa: F401
except ImportError as error:
    raise ImportError(
        "[zeropg] zeropg.lightning needs the package lightning; install it: pip install 'zeropg[lightning]'"
    ) from error

from zeropg.lightning.strategy import ZeroPGStrategy

__all__ = ["ZeroPGStrategy"]
