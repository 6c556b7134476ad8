"""Codecs: how floats become fewer bytes. Their classes are made of what compression/registry/registry.cpp reports."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, make_dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from zeropg._native import _C


@dataclass(frozen=True)
class Codec(ABC):
    """How gradients are encoded. Equal codecs on every rank.

    error_feedback: keep what encodings lose and add it to the next gradient.
    """

    error_feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        who = f"[zeropg] {type(self).__name__}:"
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"{who} error_feedback is {self.error_feedback!r}, expected True or False.")
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, Real):
                raise TypeError(f"{who} {each.name} is {value!r}, expected a number.")
        self.make_compressor()  # refuses bad parameters here, where they are given

    @abstractmethod
    def make_compressor(self) -> _C.Compressor:
        """Returns the core's codec. Raises ValueError for parameters that it does not take."""

    def make_residuals(self) -> _C.ResidualStore | None:
        """Returns an empty store for what encodings lose; None without error feedback."""
        return _C.ResidualStore() if self.error_feedback else None

    def __str__(self) -> str:
        return self.make_compressor().description + (" with error feedback" if self.error_feedback else "")


def _make_class(name: str, help: str, parameters: list[tuple[str, bool | int | float]]) -> type[Codec]:
    """The class of what C++ calls `name`: "block_quant" becomes BlockQuant(bits=8, block=256)."""

    def make_compressor(self: Codec) -> _C.Compressor:
        return _C.Compressor(name, {key: getattr(self, key) for key, _ in parameters})

    return make_dataclass(
        name.title().replace("_", ""),
        [(key, type(default), default) for key, default in parameters],
        bases=(Codec,),
        namespace={"__doc__": help, "__module__": __name__, "make_compressor": make_compressor},
        frozen=True,
    )


CODECS = {name: _make_class(name, help, parameters) for name, help, parameters in _C.compressors()}
CLASSES = {codec.__name__: codec for codec in CODECS.values()}
globals().update(CLASSES)  # pickled by their names here

if TYPE_CHECKING:

    @dataclass(frozen=True)
    class BlockQuant(Codec):
        bits: int = 8
        block: int = 256
        entropy: bool = False

        def make_compressor(self) -> _C.Compressor: ...

    @dataclass(frozen=True)
    class Bf16(Codec):
        entropy: bool = False

        def make_compressor(self) -> _C.Compressor: ...

    # Codecs whose parameters nobody has written down for type checkers.
    def __getattr__(name: str) -> Any: ...


def named_codecs(block: int = 256) -> dict[str, Codec]:
    """What commands can name: each codec with its defaults; block_quant as int8 and int4."""
    others = {name: codec() for name, codec in CODECS.items() if name != "block_quant"}
    return {"int8": BlockQuant(8, block), "int4": BlockQuant(4, block), **others}


def check_codec(codec: Any, who: str) -> Codec:
    """Returns `codec`. Raises TypeError naming `who` for anything else than a codec, such as the class itself."""
    if not isinstance(codec, Codec):
        raise TypeError(
            f"[zeropg] {who}: compression is {codec!r}; expected a codec such as zeropg.compression.BlockQuant(4)."
        )
    return codec
