"""`python -m zeropg bench optimizer`: the fused steps beside torch.optim, and beside what the memory allows."""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zeropg._native import _C
from zeropg.optim.kernels import STORAGE_OPTIONS, Kernel, class_of, kernel_of, new_state
from zeropg.tools import machine
from zeropg.tools.bench import harness
from zeropg.tools.bench.plot import plot_optimizer
from zeropg.tools.bench.results import Row, Spread, ratios
from zeropg.tools.quantities import count

_DESCRIPTION = """
Times one optimizer step over flat masters in one process. zeropg's fused kernel takes the gradients, updates masters
and state, and writes the 16-bit parameters of the computation, in one pass over memory. torch.optim steps the same
values in its for-loop, foreach and fused forms; it casts 16-bit gradients and parameters, as mixed precision must.
Bytes are those that any of them must read and write. The bound is adding a number to a tensor in place, in the same
rounds.
"""
_EXAMPLES = """
examples:
  python -m zeropg bench optimizer                             AdamW, 50 million parameters, 1 thread
  python -m zeropg bench optimizer --threads 4 --numel 100M    more threads and more parameters
  python -m zeropg bench optimizer --optimizer sgd --only float32
  python -m zeropg bench optimizer --optimizer adamw_8bit      state in fewer bits, beside zeropg's own 32

status: 0 measured; 1 a result was wrong; 2 wrong options; 3 other programs used the CPUs
"""
_STEPS = 3  # before the results are compared
# Relative to the size of an update: one learning rate. Both compute in fp32, in another order.
_TOLERANCE = 2e-2
_COMPACT_TOLERANCE = 1.0  # of state in fewer bits, whose rounding adds up


@dataclass
class Contestant:
    """`step()` does one whole optimizer step; `values()` are the fp32 parameters after it."""

    step: Callable[[], Any]
    values: Callable[[], torch.Tensor]
    bytes_each: float  # read and written per parameter


def main(arguments: list[str]) -> int:
    """Measure as `arguments` say; returns the exit status. One process."""
    options = _parse(arguments)
    quiet = harness.Quiet(options.even_if_busy)
    if quiet.refuses():
        return harness.BUSY
    torch.set_num_threads(options.threads)
    load, own = machine.OthersLoad(), harness.own_cpu_seconds()
    rows: list[Row] = []
    for dtype in options.only or ("float32", "bfloat16"):
        contestants = _contestants(options, getattr(torch, dtype))
        kernel = Kernel(options.optimizer)
        updates = _COMPACT_TOLERANCE if kernel.storage else _TOLERANCE
        wrong = _check(contestants, updates * kernel.optimizer.hyperparameters["lr"])
        if wrong:
            print(f"zeropg bench: {wrong}; nothing is measured", file=sys.stderr)
            return harness.WRONG
        rows += _time(contestants, options, dtype)
    quiet.others_during = load.stop(harness.own_cpu_seconds() - own)
    facts = harness.header(
        "optimizer",
        arguments,
        quiet,
        optimizer=options.optimizer,
        numel=options.numel,
        threads=options.threads,
        instruction_set=_C.reduction_instruction_sets()[-1],
    )
    harness.print_header(facts)
    if not quiet.may_claim:
        for row in rows:
            row.figures.pop("time_over_zeropg")
    _print(rows, options.numel, quiet)
    return harness.finish(options, quiet, facts, rows, plot_optimizer)


def _contestants(options: argparse.Namespace, param_dtype: torch.dtype) -> dict[str, Contestant]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(options.numel, generator=generator)
    gradient = torch.randn(options.numel, generator=generator).to(param_dtype)
    kernel = _C.make_optimizer(options.optimizer)
    slots = kernel.state_slots(kernel.hyperparameters)
    # Masters and state are read and written, the gradient is read, 16-bit parameters are written.
    width = param_dtype.itemsize
    state = sum(slot.entries(options.numel) * slot.dtype(torch.float32).itemsize for slot in slots) / options.numel
    bytes_each = 8 + 2 * state + width + (width if param_dtype != torch.float32 else 0)
    contestants = {"zeropg fused": _ours(options.optimizer, start, gradient, bytes_each)}
    whole = _in_32_bits(options.optimizer)
    if whole.name != options.optimizer:
        bytes_each = 8 + 8 * len(slots) + width + (width if param_dtype != torch.float32 else 0)
        contestants["zeropg 32-bit"] = _ours(whole.name, start, gradient, bytes_each)
    for form, flags in _forms(class_of(whole.torch_classes[0])).items():
        contestants[f"torch {form}"] = _theirs(whole, start, gradient, flags, bytes_each)
    return contestants


def _in_32_bits(name: str) -> Kernel:
    """The kernel of the same update whose state is in the master's dtype."""
    kernel = Kernel(name)
    if not kernel.storage:
        return kernel
    return kernel_of(kernel.torch_classes[0], kernel.torch_flags | dict.fromkeys(STORAGE_OPTIONS, 32))


def _forms(kind: Any) -> dict[str, dict[str, bool]]:
    """The flags of the forms that a class has: one of zeropg.optim is a for-loop."""
    if "foreach" not in inspect.signature(kind).parameters:
        return {"for-loop": {}}
    return {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}


def _ours(name: str, start: torch.Tensor, gradient: torch.Tensor, bytes_each: float) -> Contestant:
    kernel = _C.make_optimizer(name)
    hyperparameters = kernel.hyperparameters
    master = start.clone()
    state = [new_state(slot, master.numel(), master.dtype) for slot in kernel.state_slots(hyperparameters)]
    parameter = None if gradient.dtype == torch.float32 else master.to(gradient.dtype)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        kernel.step(
            master,
            gradient,
            state,
            parameter,
            range=(0, master.numel()),
            hyperparameters=hyperparameters,
            step=steps,
        )

    return Contestant(step, lambda: master, bytes_each)


def _theirs(
    kernel: Kernel, start: torch.Tensor, gradient: torch.Tensor, flags: dict[str, bool], bytes_each: float
) -> Contestant:
    master = torch.nn.Parameter(start.clone())
    typical = kernel.optimizer.hyperparameters
    known: dict[str, Any] = {key: value for key, value in typical.items() if value}  # 0: torch's default
    if "beta1" in known:
        known["betas"] = (known.pop("beta1"), known.pop("beta2"))
    kind: Any = class_of(kernel.torch_classes[0])
    optimizer: torch.optim.Optimizer = kind([master], **known, **flags)
    is_mixed = gradient.dtype != torch.float32
    parameter = master.detach().to(gradient.dtype)
    master.grad = torch.empty_like(start) if is_mixed else gradient.clone()

    @torch.no_grad()
    def step() -> None:
        if is_mixed:
            assert master.grad is not None
            master.grad.copy_(gradient)
        optimizer.step()
        if is_mixed:
            parameter.copy_(master)

    return Contestant(step, lambda: master.detach(), bytes_each)


def _check(contestants: dict[str, Contestant], tolerance: float) -> str:
    """Runs a few steps of each from the same start; says who differs from torch's plain loop, "" for nobody."""
    for contestant in contestants.values():
        for _ in range(_STEPS):
            contestant.step()
    reference = contestants["torch for-loop"].values()
    for name, contestant in contestants.items():
        difference = (contestant.values() - reference).abs().max().item()
        if not difference <= tolerance:
            return f"{name} differs from torch's plain loop by {difference:.3g} after {_STEPS} steps"
    return ""


def _time(contestants: dict[str, Contestant], options: argparse.Namespace, dtype: str) -> list[Row]:
    ballast = torch.zeros(options.numel)
    calls: dict[str, Callable[[], Any]] = {"": lambda: ballast.add_(1.0)}
    calls |= {name: contestant.step for name, contestant in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(options.rounds):
        for name in harness.in_turn(calls, turn):
            times = []
            for _ in range(options.iterations):
                start = time.perf_counter()
                calls[name]()
                times.append(time.perf_counter() - start)
            seconds[name].append(statistics.median(times))
    bound = 8 * options.numel / min(seconds.pop(""))  # bytes/s, the fastest round: a bound must be one
    ours = seconds["zeropg fused"]
    rows = []
    for name, values in seconds.items():
        rates = [contestants[name].bytes_each * options.numel / value for value in values]
        figures: dict[str, Spread | float] = {
            "time_ms": Spread.of([1000 * value for value in values]),
            "gbps": Spread.of([rate / 1e9 for rate in rates]),
            "bound_gbps": bound / 1e9,
            "percent_of_bound": 100 * statistics.median(rates) / bound,
            "time_over_zeropg": ratios(values, ours),
        }
        rows.append(Row(options.optimizer, name, figures, {"dtype": dtype}))
    return rows


def _print(rows: list[Row], numel: int, quiet: harness.Quiet) -> None:
    dtype: str | int = ""
    for row in rows:
        if row.parameters["dtype"] != dtype:
            dtype = row.parameters["dtype"]
            mixed = f"{dtype} gradients and parameters, fp32 masters and state"
            what = "fp32 throughout" if dtype == "float32" else mixed
            print(f"#\n# {what}; bound {row.median('bound_gbps'):.1f} GB/s")
            print(f"{'':16} {'ms':>9} {'M/s':>9} {'GB/s':>8} {'%bound':>7}  time / zeropg's")
        time_ms = row.median("time_ms")
        print(
            f"{row.peer:16} {time_ms:9.3f} {numel / time_ms / 1000:9.1f} {row.median('gbps'):8.2f} "
            f"{row.median('percent_of_bound'):7.1f}  {row.figures.get('time_over_zeropg', 'not claimed')}"
        )
    if not quiet.may_claim:
        print(f"# ratios not claimed: {quiet.refusal()}")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.make_parser(
        "optimizer", _DESCRIPTION, _EXAMPLES, output="benchmarks/results/optimizer_1_thread.json"
    )
    with_torch = [name for name in _C.optimizer_names() if _C.make_optimizer(name).torch_classes]
    parser.add_argument("--optimizer", choices=with_torch, default="adamw", help="optimizer (default adamw)")
    parser.add_argument("--numel", type=count, default=50_000_000, help="number of parameters: 100M (default 50M)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the process (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default 5)")
    parser.add_argument("--iterations", type=int, default=3, help="steps per turn (default 3)")
    parser.add_argument(
        "--only",
        action="append",
        choices=("float32", "bfloat16"),
        help="dtype of parameters and gradients; may be repeated (default: both)",
    )
    options = parser.parse_args(arguments)
    if min(options.threads, options.rounds, options.iterations) < 1:
        parser.error("--threads, --rounds and --iterations must be positive")
    return options
