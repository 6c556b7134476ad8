"""What of a model travels encoded, and how."""

import fnmatch
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from zeropg.compression.codec import Codec, check_codec

_MOST_NAMED = 8  # in the one line that says what is not encoded
_MOST_LOST = 0.25  # of normally distributed weights: block_quant with 4 bits loses a tenth, two_bit a third


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What of a model travels encoded: `fully_shard(model, compression=Plan(gradients=BlockQuant(4)))`. Frozen.

    gradients: a codec for gradients between ranks; None: as they are.
    weights: a codec for updated weights between ranks, e.g. BlockQuant(4) in stages 1 and 2 and BlockQuant(8) in stage
      3; None: as they are. In stages 1 and 2 differences between the masters and what ranks have are encoded, and what
      one encoding loses is in the next difference. In stage 3 on several nodes the weights themselves are, whenever a
      unit is made whole; what that loses is not made up for. Masters stay exact. Its error_feedback has no meaning.
    min_elements: parameters below it travel as they are: they save less than they cost.
    exclude: names of parameters that travel as they are, with the wildcards of a shell: ("*.embed*", "head.weight").

    Parameters of one dimension or none (norms, biases), of other dtypes than fp32, fp16 and bf16, and on other devices
    than the CPU never travel encoded. The first reduction says once, on rank 0, which those are.

    Raises TypeError for something that is no codec, ValueError where neither gradients nor weights have one, and where
    that for weights loses too much.
    """

    gradients: Codec | None = None
    weights: Codec | None = None
    min_elements: int = 1024
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for codec in (self.gradients, self.weights):
            if codec is not None:
                check_codec(codec, "Plan")
        if self.gradients is None and self.weights is None:
            raise ValueError("[zeropg] Plan: neither gradients nor weights have a codec; use no compression instead.")
        if self.weights is not None:
            _check_weights(self.weights)
        if not isinstance(self.min_elements, int) or isinstance(self.min_elements, bool):
            raise TypeError(f"[zeropg] Plan: min_elements is {self.min_elements!r}, expected an integer.")
        if self.min_elements < 0:
            raise ValueError(f"[zeropg] Plan: min_elements is {self.min_elements}, expected 0 or more.")
        if isinstance(self.exclude, str):
            raise TypeError(f"[zeropg] Plan: exclude is {self.exclude!r}, expected a sequence: ({self.exclude!r},).")
        if not isinstance(self.exclude, Iterable) or not all(isinstance(each, str) for each in self.exclude):
            raise TypeError(
                f'[zeropg] Plan: exclude is {self.exclude!r}, expected names of parameters, such as ("*.embed*",).'
            )
        object.__setattr__(self, "exclude", tuple(self.exclude))

    def encodes(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether the parameter, its gradient and its updates travel encoded."""
        return (
            parameter.dim() > 1
            and parameter.numel() >= self.min_elements
            and parameter.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and parameter.device.type == "cpu"
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)
        )

    def __str__(self) -> str:
        parts = [] if self.gradients is None else [f"gradients as {self.gradients}"]
        parts += [] if self.weights is None else [f"weights as {self.weights.make_compressor().description}"]
        return ", ".join(parts)


def _check_weights(codec: Codec) -> None:
    compressor = codec.make_compressor()
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    lost = (values - compressor.decode(compressor.encode(values), len(values))).norm() / values.norm()
    if lost > _MOST_LOST:
        raise ValueError(
            f"[zeropg] Plan: weights is {compressor.description}, which is too coarse for weights: it loses {lost:.0%} "
            f"of normally distributed values, expected at most {_MOST_LOST:.0%}. Use BlockQuant(4) in stages 1 and 2 "
            "and BlockQuant(8) in stage 3."
        )


def check_plan(compression: Any, who: str) -> Plan:
    """Returns `compression` as a Plan. Raises TypeError naming `who` for anything else than a plan or a codec."""
    return compression if isinstance(compression, Plan) else Plan(gradients=check_codec(compression, who))


def say_what_is_not_encoded(
    plan: Plan, parameters: Iterable[tuple[str, torch.Tensor]], *, how: str | None = None
) -> None:
    """Prints a line: how much of a model travels encoded, and what does not; and one for what excludes nothing."""
    encoded, plain, rest = 0, 0, []
    named_parameters = list(parameters)
    for pattern in plan.exclude:
        if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in named_parameters):
            print(f"[zeropg] compression: no parameter's name matches exclude={pattern!r}", file=sys.stderr)
    for name, parameter in named_parameters:
        if plan.encodes(name, parameter):
            encoded += parameter.numel()
        else:
            plain += parameter.numel()
            rest.append(name)
    if not rest:
        return
    named = ", ".join(rest[:_MOST_NAMED]) + (f" and {len(rest) - _MOST_NAMED} more" if len(rest) > _MOST_NAMED else "")
    print(
        f"[zeropg] compression: {encoded / max(1, encoded + plain):.1%} of the elements travel encoded "
        f"({how or plan}). As they are, since they are small, of one dimension or excluded: {named}",
        file=sys.stderr,
    )
