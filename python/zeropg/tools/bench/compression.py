"""`python -m zeropg bench compression`: what codecs cost, lose and save."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from zeropg._native import _C
from zeropg.compression.codec import BlockQuant, Codec, named_codecs
from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.plot import plot_compression
from zeropg.tools.bench.results import Row, Spread, ratios
from zeropg.tools.quantities import byte_count

_DESCRIPTION = """
Times each codec on one core, beside copying the floats; int8 and int4 also beside the same rounding written in torch's
operations. First these must decode to what block-wise rounding to the nearest code gives, and every codec's residual
must be what it lost. Bandwidths are of the uncompressed floats, in 1e9 bytes/s. `pays below` is the link on which
sending the codes, with encoding before and decoding after, takes as long as sending the floats: on a slower one
compression wins.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench compression                       every codec, 16 MiB of floats
  python -m zeropg bench compression --codec int8,int4 --bytes 1M --block 64

status: 0 measured; 1 a result was wrong; 2 wrong options; 3 others were using the CPUs
"""


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. One process, one thread."""
    options = _parse(arguments)
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    torch.set_num_threads(1)
    load, own = machine.OthersLoad(), harness.own_cpu_seconds()
    values = torch.randn(options.bytes // 4, generator=torch.Generator().manual_seed(0))
    rows: list[Row] = []
    for name in options.codec:
        codec = named_codecs(options.block)[name]
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
        bytes=options.bytes,
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
    heads = ("encode", "with residual", "decode", "torch's ops", "% of fp32", "L2 error", "pays below")
    print(f"{'':6}" + "".join(f" {head:>14}" for head in heads) + "   times faster than torch's ops")
    theirs = {row.case: f"{row.median('encode_gbps'):.2f}" for row in rows if row.peer == "torch"}
    for row in rows:
        if row.peer != "zeropg":
            continue
        ratio = row.figures.get("faster_than_torch", "not claimed" if row.case in theirs else "-")
        print(
            f"{row.case:6} {row.median('encode_gbps'):14.2f} {row.median('encode_with_residual_gbps'):14.2f} "
            f"{row.median('decode_gbps'):14.2f} {theirs.get(row.case, '-'):>14} {row.median('percent_of_fp32'):14.1f} "
            f"{row.median('relative_l2_error'):14.4f} {row.median('pays_below_gbps'):9.2f} GB/s   {ratio}"
        )
    if not quiet.may_claim:
        print(f"# ratios not claimed: {quiet.refusal()}")


def _round_by_blocks(values: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, codes) as compression/README.md says, in torch's operations; `values` fill whole blocks."""
    largest = 2 ** (bits - 1) - 1
    blocks = values.view(-1, block)
    scales = (blocks.abs().amax(1, keepdim=True) / largest).bfloat16().float()
    codes = (blocks / scales).round().clamp(-largest, largest)
    return scales, codes.to(torch.int8)


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
    residual = torch.zeros_like(values)
    decoded = compressor.decode(compressor.encode(values, residual), values.numel())
    lost = (values - decoded - residual).abs().max().item()
    return f"a residual misses {lost:.3g} of what was lost" if lost > 1e-5 else ""


def _time(name: str, codec: Codec, values: torch.Tensor, rounds: int) -> list[Row]:
    numel, compressor = values.numel(), codec.make_compressor()
    encoded = compressor.encode(values)
    residual, target = torch.zeros_like(values), torch.empty_like(values)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(values),
        "encode": lambda: compressor.encode(values),
        "encode_with_residual": lambda: compressor.encode(values, residual),
        "decode": lambda: compressor.decode(encoded, numel),
    }
    if isinstance(codec, BlockQuant):
        bits, block = codec.bits, codec.block
        whole = values[: numel // block * block]
        calls["torch_encode"] = lambda: _round_by_blocks(whole, bits, block)
    seconds: dict[str, list[float]] = {each: [] for each in calls}
    for turn in range(rounds):
        for each in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
            calls[each]()
            start = time.perf_counter()
            calls[each]()
            seconds[each].append(time.perf_counter() - start)
    gbps = {each: Spread.of([4 * numel / took / 1e9 for took in times]) for each, times in seconds.items()}
    both = statistics.median(seconds["encode_with_residual"]) + statistics.median(seconds["decode"])
    share = encoded.numel() / (4 * numel)
    decoded = compressor.decode(encoded, numel)
    figures: dict[str, Spread | float] = {
        **{f"{each}_gbps": gbps[each] for each in ("encode", "encode_with_residual", "decode")},
        "percent_of_fp32": 100 * share,
        "relative_l2_error": ((decoded - values).norm() / values.norm()).item(),
        "pays_below_gbps": (1 - share) * 4 * numel / both / 1e9,
    }
    rows = [Row(name, "zeropg", figures), Row(name, "copy", {"copy_gbps": gbps["copy"]})]
    if "torch_encode" in seconds:
        figures["faster_than_torch"] = ratios(seconds["torch_encode"], seconds["encode"])
        rows.append(Row(name, "torch", {"encode_gbps": gbps["torch_encode"]}))
    return rows


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser("compression", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/compression.json")
    names = tuple(named_codecs())
    parser.add_argument(
        "--codec",
        type=harness.choice(names),
        default=list(names),
        help=f"comma list or all (default): {', '.join(names)}",
    )
    parser.add_argument("--bytes", type=byte_count, default=16 << 20, help="of floats (default 16M)")
    parser.add_argument("--block", type=int, default=256, help="elements per scale of int8 and int4 (default 256)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant (default 9)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be positive")
    if options.block % 32 != 0 or not 32 <= options.block <= 4096:
        parser.error(f"--block {options.block}: expected a multiple of 32 from 32 to 4096")
    if options.bytes < 4 * options.block:
        parser.error(f"--bytes {options.bytes} is less than a block")
    return options
