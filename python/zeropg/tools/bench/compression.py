"""`python -m zeropg bench compression`: what codecs cost, lose and save."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from zeropg._native import _C
from zeropg.compression.codec import CODECS, BlockQuant, Codec, named_codecs
from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.plot import plot_compression
from zeropg.tools.bench.results import Row, Spread, ratios
from zeropg.tools.quantities import byte_count, size

_SIZES = "1M,64M"  # a bucket of gradients, which stays in the last cache, and more than caches hold

_DESCRIPTION = """
Times each codec on one core, at a size that caches hold and at one that they do not, beside copying as many floats,
which is what the memory allows; int8 and int4 also beside the same rounding written in torch's operations, and top_k
beside torch.topk. First these must decode to what those operations give, and every codec's residual must be what it
lost. Bandwidths are of the uncompressed floats, in 1e9 bytes/s. `pays below` is the link on which sending the codes,
with encoding before and decoding after, takes as long as sending the floats: on a slower one compression wins.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench compression                       every codec, 1 MiB and 64 MiB of floats
  python -m zeropg bench compression --codec int8,int4 --bytes 1M --block 64

status: 0 measured; 1 a result was wrong; 2 wrong options; 3 other programs used the CPUs
"""


def codecs(block: int = 256) -> dict[str, Codec]:
    """What is timed: what commands can name, and rotations."""
    low_bit: dict[str, Callable[..., Codec]] = {name: CODECS[name] for name in ("two_bit", "one_bit")}
    rotated = {f"{name}_rotated": make(rotate=True) for name, make in low_bit.items()}
    return named_codecs(block) | rotated


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. One process, one thread."""
    options = _parse(arguments)
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    torch.set_num_threads(1)
    load, own = machine.OthersLoad(), harness.own_cpu_seconds()
    rows: list[Row] = []
    for size_bytes in options.bytes:
        values = torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(0))
        for name in options.codec:
            codec = codecs(options.block)[name]
            wrong = _check(codec, values)
            if wrong:
                print(f"zeropg bench: {codec}: {wrong}; nothing is measured", file=sys.stderr)
                return harness.WRONG
            rows += _time(name, codec, values, options.rounds)
    quiet.others_during = load.stop(harness.own_cpu_seconds() - own)
    facts = harness.header(
        "compression",
        arguments,
        quiet,
        block=options.block,
        instruction_set=_C.reduction_instruction_sets()[-1],
    )
    harness.print_header(facts)
    if not quiet.may_claim:
        for row in rows:
            row.figures.pop("faster_than_torch", None)
    _print(rows, quiet)
    return harness.finish(options, quiet, facts, rows, plot_compression)


def _print(rows: list[Row], quiet: harness.Quiet) -> None:
    heads = ("encode", "with residual", "decode, add", "torch's ops", "copy", "% of fp32", "L2 error", "pays below")
    print(f"{'':25}" + "".join(f" {head:>13}" for head in heads) + "   times faster than torch's ops")
    found = {(row.case, row.parameters["bytes"], row.peer): row for row in rows}
    for (case, count, peer), row in found.items():
        if peer != "zeropg":
            continue
        theirs = found.get((case, count, "torch"))
        ratio = row.figures.get("faster_than_torch", "not claimed" if theirs else "-")
        cells = [f"{row.median(f'{each}_gbps'):.2f}" for each in ("encode", "encode_with_residual", "decode_add")]
        cells += [f"{theirs.median('encode_gbps'):.2f}" if theirs else "-"]
        cells += [f"{found[case, count, 'copy'].median('copy_gbps'):.2f}", f"{row.median('percent_of_fp32'):.1f}"]
        cells += [f"{row.median('relative_l2_error'):.4f}", f"{row.median('pays_below_gbps'):.2f} GB/s"]
        print(f"{case:16} {size(int(count)):>8}" + "".join(f" {cell:>13}" for cell in cells) + f"   {ratio}")
    if not quiet.may_claim:
        print(f"# ratios not claimed: {quiet.refusal()}")


def _round_by_blocks(values: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, codes) as compression/README.md says, in torch's operations; `values` fill whole blocks."""
    largest = 2 ** (bits - 1) - 1
    blocks = values.view(-1, block)
    scales = (blocks.abs().amax(1, keepdim=True) / largest).bfloat16().float()
    codes = (blocks / scales).round().clamp(-largest, largest)
    return scales, codes.to(torch.int8)


def _select(values: torch.Tensor, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(places, values) of the largest magnitudes, in torch's operations."""
    places = values.abs().topk(math.ceil(ratio * values.numel()), sorted=False).indices
    return places, values[places]


def _check(codec: Codec, values: torch.Tensor) -> str:
    compressor = codec.make_compressor()
    if isinstance(codec, BlockQuant):
        whole = values[: values.numel() // codec.block * codec.block]
        scales, codes = _round_by_blocks(whole, codec.bits, codec.block)
        expected = (codes * scales).flatten()
        decoded = compressor.decode(compressor.encode(whole), whole.numel())
        # A value in the middle between two codes may fall to either, where the division rounds.
        differ = int((decoded != expected).sum())
        if differ > 1e-4 * whole.numel():
            return f"{differ} of {whole.numel()} values are not what block-wise rounding gives"
    parameters = vars(codec)
    if _is_top_k(codec) and parameters["exact"] and parameters["value_bits"] == 32:
        places, largest = _select(values, parameters["ratio"])
        expected = torch.zeros_like(values).scatter_(0, places, largest)
        decoded = compressor.decode(compressor.encode(values), values.numel())
        if abs(int((decoded != expected).sum())) > 1:  # of how many is rounded
            return "it does not send what torch.topk finds"
    residual = torch.zeros_like(values)
    decoded = compressor.decode(compressor.encode(values, residual), values.numel())
    lost = (values - decoded - residual).abs().max().item()
    return f"a residual misses {lost:.3g} of what was lost" if lost > 1e-5 else ""


def _is_top_k(codec: Codec) -> bool:
    return isinstance(codec, CODECS["top_k"])


def _time(name: str, codec: Codec, values: torch.Tensor, rounds: int) -> list[Row]:
    numel, compressor = values.numel(), codec.make_compressor()
    residual, target = torch.zeros_like(values), torch.zeros_like(values)
    room = torch.empty(compressor.capacity_bytes(numel), dtype=torch.uint8)
    encoded = compressor.encode(values)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(values),
        "encode": lambda: compressor.encode(values, out=room),
        "encode_with_residual": lambda: compressor.encode(values, residual, room),
        "decode_add": lambda: compressor.decode_add(encoded, target),
    }
    if isinstance(codec, BlockQuant):
        bits, block = codec.bits, codec.block
        whole = values[: numel // block * block]
        calls["torch_encode"] = lambda: _round_by_blocks(whole, bits, block)
    elif _is_top_k(codec):
        ratio = vars(codec)["ratio"]
        calls["torch_encode"] = lambda: _select(values, ratio)
    seconds: dict[str, list[float]] = {each: [] for each in calls}
    for turn in range(rounds):
        for each in harness.in_turn(calls, turn):
            calls[each]()
            start = time.perf_counter()
            calls[each]()
            seconds[each].append(time.perf_counter() - start)
    gbps = {each: Spread.of([4 * numel / took / 1e9 for took in times]) for each, times in seconds.items()}
    both = statistics.median(seconds["encode_with_residual"]) + statistics.median(seconds["decode_add"])
    share = encoded.numel() / (4 * numel)
    decoded = compressor.decode(encoded, numel)
    figures: dict[str, Spread | float] = {
        **{f"{each}_gbps": gbps[each] for each in ("encode", "encode_with_residual", "decode_add")},
        "percent_of_fp32": 100 * share,
        "relative_l2_error": ((decoded - values).norm() / values.norm()).item(),
        "pays_below_gbps": (1 - share) * 4 * numel / both / 1e9,
    }
    size_of = {"bytes": 4 * numel}
    rows = [Row(name, "zeropg", figures, {**size_of}), Row(name, "copy", {"copy_gbps": gbps["copy"]}, {**size_of})]
    if "torch_encode" in seconds:
        figures["faster_than_torch"] = ratios(seconds["torch_encode"], seconds["encode"])
        rows.append(Row(name, "torch", {"encode_gbps": gbps["torch_encode"]}, {**size_of}))
    return rows


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser("compression", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/compression.json")
    names = tuple(codecs())
    parser.add_argument(
        "--codec",
        type=harness.choice(names),
        default=list(names),
        help=f"codecs, with commas, or all: {', '.join(names)} (default all)",
    )
    parser.add_argument(
        "--bytes",
        type=lambda text: [byte_count(each) for each in text.split(",")],
        default=_SIZES,
        help=f"of floats, sizes with commas between them (default {_SIZES})",
    )
    parser.add_argument("--block", type=int, default=256, help="elements per scale of int8 and int4 (default 256)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant (default 9)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be positive")
    if options.block % 32 != 0 or not 32 <= options.block <= 4096:
        parser.error(f"--block {options.block}: expected a multiple of 32 from 32 to 4096")
    if min(options.bytes) < 4 * options.block:
        parser.error(f"--bytes {min(options.bytes)} is less than a block")
    return options
