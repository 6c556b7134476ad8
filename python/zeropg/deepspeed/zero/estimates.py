"""DeepSpeed's estimates of memory: what its stages 2 and 3 take of GPUs and hosts, from its documented formulas.

`python -m zeropg plan` has those of zeropg, for CPUs too.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Estimate(NamedTuple):
    """One row: bytes of the host and of a GPU, per node and per GPU, and what is assumed."""

    cpu_bytes: float
    gpu_bytes: float
    options: str


def zero2_rows(total_params: float, gpus: int, nodes: int, factor: float) -> list[Estimate]:
    """With the optimizer on the host, and on the GPUs. 16-bit parameters, fp32 masters and Adam's two moments."""
    world = gpus * nodes
    return [
        Estimate(total_params * max(4 * world, 16) * factor, 2 * total_params, "offload_optimizer=cpu"),
        Estimate(
            total_params * 4 * gpus * factor, 2 * total_params + 18 * total_params / world, "offload_optimizer=none"
        ),
    ]


def zero3_rows(total_params: float, largest: float, gpus: int, nodes: int, factor: float) -> list[Estimate]:
    """For each place of parameters and optimizer, with the model built in zero.Init and without."""
    world, live = gpus * nodes, 4 * largest
    whole = 4 * total_params * gpus  # every process of a node builds the whole model in fp32
    rows = []
    for param, optimizer, host, gpu in (
        ("cpu", "cpu", 18 * total_params / nodes, live),
        ("none", "cpu", 16 * total_params / nodes, live + 2 * total_params / world),
        ("none", "none", 0.0, live + 18 * total_params / world),
    ):
        for in_init in (1, 0):
            at_start = live * gpus if optimizer == "none" and in_init else 0.0
            needed = max(host, at_start if in_init else whole) * factor
            options = f"offload_param={param:4}, offload_optimizer={optimizer:4}, zero_init={in_init}"
            rows.append(Estimate(needed, gpu, options))
    return rows


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the rows for a model."""
    total, _ = _sizes(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the rows for a number of parameters."""
    rows = zero2_rows(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    _show(f"{total_params / 1e6:.0f}M parameters", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the rows for a model."""
    total, largest = _sizes(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the rows for a number of parameters, of which the largest layer has `largest_layer_params`."""
    rows = zero3_rows(total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    what = f"{total_params / 1e6:.0f}M parameters, {largest_layer_params / 1e6:.0f}M in the largest layer"
    _show(what, num_gpus_per_node, num_nodes, rows)


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Elements of the model, and of its largest layer's own parameters."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return total, max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())


def _show(what: str, gpus: int, nodes: int, rows: list[Estimate]) -> None:
    print(f"DeepSpeed's estimate for parameters, gradients and optimizer state of {what}, {nodes} x {gpus} GPUs:")
    print("  per CPU  |  per GPU |   Options")
    for row in rows:
        print(f" {row.cpu_bytes / 2**30:7.2f}GB | {row.gpu_bytes / 2**30:6.2f}GB | {row.options}")
