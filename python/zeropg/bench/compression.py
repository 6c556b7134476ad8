"""`python -m zeropg bench compression`: what codecs cost, lose and save."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from zeropg import _machine
from zeropg._native import _C
from zeropg._quantities import byte_count
from zeropg.bench import harness
from zeropg.bench.plot import plot_compression

_DESCRIPTION = """
Times each codec on one core, beside the same rounding written in torch's operations, and beside copying the floats.
First both must decode to what block-wise rounding to the nearest code gives. Bandwidths are of the uncompressed floats,
in 1e9 bytes/s. `pays below` is the link on which sending the codes, with encoding before and decoding after, takes as
long as sending the floats: on a slower one compression wins.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench compression                       int8 and int4, 16 MiB of floats
  python -m zeropg bench compression --bytes 1M --block 64

status: 0 measured; 1 a result was wrong; 2 wrong options; 3 others were using the CPUs
"""


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. One process, one thread."""
    options = _parse(arguments)
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    torch.set_num_threads(1)
    load, own = _machine.OthersLoad(), harness.own_cpu_seconds()
    values = torch.randn(options.bytes // 4, generator=torch.Generator().manual_seed(0))
    table: dict[str, Any] = {}
    for bits in (8, 4):
        codec = _C.Compressor("block_quant", {"bits": bits, "block": options.block})
        wrong = _check(codec, values, bits, options.block)
        if wrong:
            print(f"zeropg bench: {codec.description}: {wrong}; nothing is measured", file=sys.stderr)
            return harness.WRONG
        table[f"int{bits}"] = _time(codec, values, bits, options)
    quiet.others_during = load.stop(harness.own_cpu_seconds() - own)
    facts = harness.header(
        harness.command_line("compression", arguments),
        quiet,
        bytes=options.bytes,
        block=options.block,
        instruction_set=_C.reduction_instruction_sets()[-1],
    )
    harness.print_header(facts)
    heads = ("encode", "with residual", "decode", "torch's ops", "% of fp32", "L2 error", "pays below")
    print(f"{'':6}" + "".join(f" {head:>14}" for head in heads) + "   times faster than torch's ops")
    for name, row in table.items():
        ratio = harness.Spread(**row["times_faster"]) if quiet.may_claim else "not claimed"
        if not quiet.may_claim:
            row["times_faster"] = None
        print(
            f"{name:6} {row['encode_gbps']:14.2f} {row['encode_with_residual_gbps']:14.2f} {row['decode_gbps']:14.2f} "
            f"{row['torch_encode_gbps']:14.2f} {row['percent_of_fp32']:14.1f} {row['relative_l2_error']:14.4f} "
            f"{row['pays_below_gbps']:9.2f} GB/s   {ratio}"
        )
    if not quiet.may_claim:
        print(f"# ratios not claimed: {quiet.refusal()}")
    document = {"header": facts, "table": table}
    return harness.finish(options, quiet, document, plot_compression)


def _round_by_blocks(values: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, codes) as compression/README.md says, in torch's operations; `values` fill whole blocks."""
    largest = 2 ** (bits - 1) - 1
    blocks = values.view(-1, block)
    scales = (blocks.abs().amax(1, keepdim=True) / largest).bfloat16().float()
    codes = (blocks / scales).round().clamp(-largest, largest)
    return scales, codes.to(torch.int8)


def _check(codec: Any, values: torch.Tensor, bits: int, block: int) -> str:
    whole = values[: values.numel() // block * block]
    scales, codes = _round_by_blocks(whole, bits, block)
    expected = (codes * scales).flatten()
    decoded = codec.decode(codec.encode(whole), whole.numel())
    # A value in the middle between two codes may fall to either, where the division rounds.
    differ = int((decoded != expected).sum())
    if differ > 1e-4 * whole.numel():
        return f"{differ} of {whole.numel()} values are not what block-wise rounding gives"
    residual = torch.zeros_like(whole)
    decoded = codec.decode(codec.encode(whole, residual), whole.numel())
    lost = (whole - decoded - residual).abs().max().item()
    return f"a residual misses {lost:.3g} of what was lost" if lost > 1e-5 else ""


def _time(codec: Any, values: torch.Tensor, bits: int, options: argparse.Namespace) -> dict[str, Any]:
    numel, block = values.numel(), options.block
    encoded = codec.encode(values)
    residual = torch.zeros_like(values)
    whole, target = values[: numel // block * block], torch.empty_like(values)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(values),
        "encode": lambda: codec.encode(values),
        "encode_with_residual": lambda: codec.encode(values, residual),
        "decode": lambda: codec.decode(encoded, numel),
        "torch_encode": lambda: _round_by_blocks(whole, bits, block),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(options.rounds):
        for name in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
            calls[name]()
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    share = encoded.numel() / (4 * numel)
    decoded = codec.decode(encoded, numel)
    return {
        **{f"{name}_gbps": 4 * numel / took / 1e9 for name, took in median.items()},
        "percent_of_fp32": 100 * share,
        "relative_l2_error": ((decoded - values).norm() / values.norm()).item(),
        "pays_below_gbps": (1 - share) * 4 * numel / (median["encode_with_residual"] + median["decode"]) / 1e9,
        "times_faster": vars(harness.ratios(seconds["torch_encode"], seconds["encode"])),
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser("compression", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/compression.json")
    parser.add_argument("--bytes", type=byte_count, default=16 << 20, help="of floats (default 16M)")
    parser.add_argument("--block", type=int, default=256, help="elements per scale (default 256)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant (default 9)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be positive")
    if options.block % 32 != 0 or not 32 <= options.block <= 4096:
        parser.error(f"--block {options.block}: expected a multiple of 32 from 32 to 4096")
    if options.bytes < 4 * options.block:
        parser.error(f"--bytes {options.bytes} is less than a block")
    return options
