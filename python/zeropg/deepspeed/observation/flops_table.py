"""The report of the flops profiler, in DeepSpeed's words: from figures to lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zeropg.deepspeed.observation.observer import Phase

_WIDTH = 86


@dataclass
class Part:
    """A module: its parameters, and the floating-point operations and seconds of its forwards of one micro-batch.

    depth: 0 for the whole model.
    """

    name: str
    kind: str
    depth: int
    params: int
    flops: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Of one rank. samples: of an update of all ranks. flops, seconds: of a micro-batch; seconds: also of the step."""

    step: int
    world_size: int
    micro_batch: int
    samples: int
    flops: Mapping[Phase, int]
    seconds: Mapping[Phase, float]
    update_seconds: float


def lines(measured: Measured, parts: Sequence[Part], depth: int, top: int, detailed: bool) -> list[str]:
    """The report. depth: of the aggregated profile; -1: the deepest. top: modules that it names."""
    text = [*_rule("zeropg flops profiler"), *_heading(measured, parts[0].params)]
    text += [*_rule("aggregated profile of the forward"), *_aggregated(parts, depth, top)]
    if detailed:
        text += [*_rule("detailed profile of the forward"), *_detailed(parts)]
    return [*text, "-" * _WIDTH]


def short(value: float, unit: str = "") -> str:
    """ "12.3 G" of 12.3e9."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def _heading(measured: Measured, params: int) -> list[str]:
    flops, seconds = measured.flops, measured.seconds
    rows = [
        ("step", str(measured.step)),
        ("world size", str(measured.world_size)),
        ("micro-batch size of a rank", str(measured.micro_batch)),
        ("params of the model", short(params)),
    ]
    phases: tuple[tuple[Phase, str], ...] = (("forward", "fwd"), ("backward", "bwd"))
    for phase, name in phases:
        counted, took = flops.get(phase, 0), seconds.get(phase, 0.0)
        rows.append((f"{name} flops of a micro-batch", short(counted) if counted else "not seen: run by the program"))
        if took:
            rows.append((f"{name} latency", f"{1e3 * took:.2f} ms, {short(counted / took, 'FLOPS')}"))
    rows.append(("step latency", f"{1e3 * seconds.get('step', 0.0):.2f} ms"))
    rows.append(("update latency", f"{1e3 * measured.update_seconds:.2f} ms"))
    whole = sum(flops.values()) * measured.samples / (measured.micro_batch * measured.world_size)
    rows.append(("FLOPS of a rank over the update", short(whole / measured.update_seconds, "FLOPS")))
    rows.append(("samples/second", f"{measured.samples / measured.update_seconds:.2f}"))
    return [f"{name + ':':36}{value}" for name, value in rows]


def _aggregated(parts: Sequence[Part], depth: int, top: int) -> list[str]:
    """For each depth, the classes of modules with the most params, flops and seconds."""
    deepest = max(part.depth for part in parts)
    shown = range(deepest + 1) if depth < 0 else range(depth, min(depth, deepest) + 1)
    figures: tuple[tuple[str, Callable[[Part], float], Callable[[float], str]], ...] = (
        ("params", lambda part: part.params, short),
        ("flops", lambda part: part.flops, short),
        ("fwd latency", lambda part: part.seconds, lambda seconds: f"{1e3 * seconds:.2f} ms"),
    )
    text = []
    for level in shown:
        text.append(f"depth {level}:")
        for name, figure, written in figures:
            sums: dict[str, float] = {}
            for part in parts:
                if part.depth == level:
                    sums[part.kind] = sums.get(part.kind, 0) + figure(part)
            most = sorted(sums.items(), key=lambda item: -item[1])[:top]
            text.append(f"  {name:12} " + ", ".join(f"{kind}: {written(value)}" for kind, value in most))
    return text


def _detailed(parts: Sequence[Part]) -> list[str]:
    whole = parts[0]
    text = []
    for part in parts:
        shares = (
            f"{short(part.params)} params {_percent(part.params, whole.params)}",
            f"{short(part.flops)} flops {_percent(part.flops, whole.flops)}",
            f"{1e3 * part.seconds:.2f} ms {_percent(part.seconds, whole.seconds)}",
        )
        name = part.name.rpartition(".")[2]
        text.append(f"{'  ' * part.depth}{f'({name}) ' if name else ''}{part.kind}: {', '.join(shares)}")
    return text


def _percent(part: float, whole: float) -> str:
    return f"({100 * part / whole:.1f}%)" if whole else "(-)"


def _rule(title: str) -> list[str]:
    return [f" {title} ".center(_WIDTH, "-")]
