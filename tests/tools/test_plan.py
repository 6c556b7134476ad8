"""`python -m zeropg plan`: its formulas against the paper, and against what training really holds."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeropg
from tests.memory import held_bytes
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import run_ranks
from zeropg import __main__ as program
from zeropg._native import _C
from zeropg.compression import BlockQuant, Codec, Plan
from zeropg.tools.plan.formulas import OPTIMIZER_SLOTS, Settings, bytes_per_kind, memory, paper_bytes, traffic
from zeropg.tools.plan.shape import Flat, ModelShape, Unit, shape_of, shape_of_config, shape_of_gpt
from zeropg.tools.train.memory import measured_bytes

GIB = 2**30


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_formula_gives_the_figures_of_the_zero_paper(stage, gigabytes):
    assert sum(paper_bytes(stage, 64, 7_500_000_000, torch.bfloat16).values()) / 1e9 == pytest.approx(
        gigabytes, abs=0.06
    )


@pytest.mark.parametrize(("stage", "bytes_each"), [(0, 16), (1, 12), (2, 10), (3, 8)])
def test_formula_of_float32_on_two_ranks(stage, bytes_each):
    assert sum(paper_bytes(stage, 2, 1000, torch.float32).values()) == 1000 * bytes_each


@pytest.mark.parametrize(("stage", "float32", "bfloat16"), [(0, 16, 18), (1, 12, 12), (2, 10, 10), (3, 8, 9)])
def test_plan_counts_as_the_readme_of_sharding_on_two_ranks(stage, float32, bfloat16):
    shape = shape_of_gpt(10_000_000)
    for dtype, each in ((None, float32), (torch.bfloat16, bfloat16)):
        kinds = bytes_per_kind(memory(shape, Settings(stage=stage, ranks=2, param_dtype=dtype)))
        held = sum(kinds[name] for name in ("parameters", "masters", "optimizer", "gradients"))
        assert held / shape.parameters == pytest.approx(each, rel=1e-3)


def train_and_measure(
    stage: int,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    backend: str,
    weights: Codec | None = None,
    replicas: int = 1,
    keep_numel: int = 0,
) -> Any:
    """(planned, measured) bytes per kind of the small GPT after three steps."""
    model = make_model()
    settings = Settings(
        stage=stage,
        ranks=dist.get_world_size(),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        backend=backend,
        weights=weights,
        replicas=replicas,
        keep_numel=keep_numel,
    )
    planned = bytes_per_kind(memory(shape_of(model), settings))
    planned["optimizer"] += planned.pop("masters")
    compression = None if weights is None else Plan(weights=weights)
    mesh = None if replicas == 1 else init_device_mesh("cpu", (replicas, settings.shards))
    zeropg.fully_shard(
        model,
        stage=stage,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        compression=compression,
        mesh=mesh,
        keep_numel=keep_numel,
    )
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    for batch in make_batches(3):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return planned, measured_bytes(model, optimizer)


def check(planned: dict[str, int], measured: dict[str, int]) -> None:
    for kind in ("parameters", "gradients"):
        assert measured[kind] == planned[kind], kind
    # Measured are the parameters' moments; planned is what is allocated, padding included.
    assert 0.98 * planned["optimizer"] <= measured["optimizer"] <= planned["optimizer"]
    # How many buckets and units live at once depends on the ranks' timing; the plan says the most.
    for kind in ("buckets", "gathered"):
        assert measured[kind] <= planned[kind], kind
        assert measured[kind] >= 0.5 * planned[kind], kind


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_plan_matches_what_the_core_holds(rank_pool, world_size, stage):
    pool = rank_pool(world_size)
    for param_dtype, reduce_dtype in ((None, None), (torch.bfloat16, None), (torch.bfloat16, torch.bfloat16)):
        planned, measured = pool.run(train_and_measure, stage, param_dtype, reduce_dtype, "zeropg", timeout=90)[0]
        check(planned, measured)


@pytest.mark.parametrize("stage", [1, 2])
def test_plan_matches_what_the_core_holds_with_weights_as_differences(rank_pool, stage):
    pool = rank_pool(2)
    for param_dtype in (None, torch.bfloat16):
        planned, measured = pool.run(train_and_measure, stage, param_dtype, None, "zeropg", BlockQuant(4), timeout=90)[
            0
        ]
        assert measured["gathered"] == planned["gathered"] > 0
        check(planned, measured)


def test_encoded_weights_take_fewer_bytes_between_nodes(capsys):
    shape = shape_of_gpt(100_000_000)
    settings = Settings(stage=2, ranks=4, nodes=2)
    plain = traffic(shape, settings)
    both = traffic(shape, replace(settings, compression=BlockQuant(4), weights=BlockQuant(4)))
    sums = [sum(row.between_bytes for row in rows) for rows in (plain, both)]
    assert sums[1] / sums[0] == pytest.approx(130 / 1024, rel=1e-3)
    bf16 = Settings(stage=3, ranks=4, nodes=2, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    encoded = replace(bf16, reduce_dtype=None, compression=BlockQuant(4), weights=BlockQuant(8))
    sums = [sum(row.between_bytes for row in traffic(shape, each)) for each in (bf16, encoded)]
    assert sums[0] / sums[1] == pytest.approx(3 * 2 / (130 / 256 + 2 * 258 / 256), rel=0.03)
    arguments = ["plan", "--params", "1e6", "--stage", "2", "--weights"]
    assert program.main([*arguments, "int4"]) == 0
    assert "masters" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        program.main([*arguments, "one_bit"])
    assert "too coarse" in capsys.readouterr().err


def test_the_ranks_of_a_node_hold_one_copy_of_what_is_gathered_together():
    shape = shape_of_gpt(1_000_000)
    settings = Settings(stage=3, ranks=4, nodes=2, param_dtype=torch.bfloat16)
    gathered = {
        name: bytes_per_kind(memory(shape, each))["gathered"]
        for name, each in {
            "together": settings,
            "apart": replace(settings, backend="gloo"),
            "alone": replace(settings, ranks=2),
        }.items()
    }
    assert 2 * gathered["together"] == pytest.approx(gathered["apart"], rel=1e-3)
    assert gathered["alone"] == pytest.approx(gathered["apart"], rel=1e-3)


def test_plan_matches_what_the_core_holds_where_units_are_gathered():
    planned, measured = run_ranks(2, train_and_measure, 3, torch.bfloat16, None, "gloo", backend="gloo", timeout=90)[0]
    assert planned["gathered"] > 0
    for kind in ("parameters", "gradients", "gathered"):
        assert 0.5 * planned[kind] <= measured[kind] <= planned[kind]


def test_plan_knows_what_is_kept_for_the_backward():
    block = sum(parameter.numel() for parameter in make_model().blocks[0].parameters())
    arguments = (3, None, None, "gloo", None, 1)
    planned = {}
    for keep_numel in (0, block, 10**9):
        ((plan, measured),) = run_ranks(2, train_and_measure, *arguments, keep_numel, backend="gloo", timeout=90)[:1]
        planned[keep_numel] = plan["gathered"]
        assert 0.5 * plan["gathered"] <= measured["gathered"] <= plan["gathered"]
    assert planned[0] < planned[block] <= planned[10**9]
    shape = shape_of(make_model())
    settings = Settings(stage=3, ranks=4, nodes=2)
    backward = [traffic(shape, replace(settings, keep_numel=kept))[-1] for kept in (0, block, 3 * block, 10**9)]
    assert backward[1].between_bytes == pytest.approx(backward[0].between_bytes * 2 / 3, rel=1e-6)
    assert backward[2].between_bytes == backward[3].between_bytes == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_plan_knows_copies_of_the_model(rank_pool, stage):
    arguments = (stage, torch.bfloat16, None, "zeropg", None, 2)
    planned, measured = rank_pool(4).run(train_and_measure, *arguments, timeout=90)[0]
    check(planned, measured)


def test_copies_on_nodes_send_their_shards_alone_between_them():
    shape = ModelShape("one matrix", (Unit("a", (Flat((1 << 20,), torch.float32),)), Unit("", ())))
    settings = Settings(stage=3, ranks=8, nodes=2, replicas=2)
    size = shape.units[0].flats[0].total_numel(4) * 4
    in_copy, between, parameters = traffic(shape, settings)
    assert (in_copy.between_bytes, between.inside_bytes) == (0, 0)
    assert in_copy.inside_bytes == pytest.approx(size * 3 / 4)
    assert between.between_bytes == pytest.approx(2 * size / 4 / 2)
    assert parameters.what == "parameters: shared in the node"
    encoded = traffic(shape, replace(settings, compression=BlockQuant(4)))[1]
    assert encoded.between_bytes / between.between_bytes == pytest.approx(130 / 1024, rel=1e-5)
    across = traffic(shape, replace(settings, nodes=8))  # each copy on four nodes
    assert [row.inside_bytes for row in across] == [0] * 4
    assert across[0].between_bytes == pytest.approx(size * 3 / 4)
    inside = traffic(shape, replace(settings, nodes=1))
    assert [row.between_bytes for row in inside] == [0] * 3


class Wide(nn.Module):
    """Mostly parameters, hardly any activations: 24 million in eight blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def trimmed_bytes() -> int:
    """What the process holds without what malloc keeps of memory that was freed."""
    ctypes.CDLL(None).malloc_trim(0)
    return held_bytes()


def train_wide(width: int, stage: int) -> tuple[int, int, int]:
    """Bytes held before the model and after three steps, and what is planned."""
    before = trimmed_bytes()
    model = Wide(width)
    planned = sum(h.bytes for h in memory(shape_of(model), Settings(stage=stage, ranks=dist.get_world_size())))
    zeropg.fully_shard(model, stage=stage)
    optimizer = zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    for _ in range(3):
        model(torch.ones(2, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # both ranks hold everything while both look
    after = trimmed_bytes()
    dist.barrier()
    return before, after, planned


def train_wide_twice(stage: int) -> tuple[int, int, int]:
    train_wide(64, stage)  # what the first training of a process loads, however small, is not the model's
    return train_wide(1728, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_plan_matches_what_processes_really_hold(stage):
    """Within a quarter: activations and what torch's kernels keep come on top."""
    for before, after, planned in run_ranks(2, train_wide_twice, stage, timeout=90):
        assert 0.85 * planned < after - before < 1.25 * planned, (planned / 2**20, (after - before) / 2**20)


def test_optimizers_state_is_what_the_kernels_say():
    values = {"momentum": 0.9, "amsgrad": 0.0, "nesterov": 0.0, "dampening": 0.0, "maximize": 0.0}
    for name in _C.optimizer_names():
        kernel = _C.make_optimizer(name)
        hyperparameters = {key: values.get(key, 0.5) for key in kernel.hyperparameters}
        slots = kernel.state_slots(hyperparameters)
        planned = OPTIMIZER_SLOTS[f"{name}-momentum" if f"{name}-momentum" in OPTIMIZER_SLOTS else name]
        assert [slot.name for slot in slots] == [slot.name for slot in planned]


@pytest.mark.parametrize(("optimizer", "each"), [("adamw", 8), ("adamw_16bit", 4), ("adam_8bit", 2 + 2 / 32)])
def test_state_in_fewer_bits_takes_less(optimizer, each):
    shape = ModelShape("one matrix", (Unit("a", (Flat((1 << 20,), torch.float32),)), Unit("", ())))
    held = bytes_per_kind(memory(shape, Settings(stage=1, ranks=2, optimizer=optimizer)))
    assert held["optimizer"] == each * (1 << 19)


def test_traffic_reaches_the_lower_bounds():
    shape = ModelShape("one matrix", (Unit("a", (Flat((1 << 20,), torch.float32),)), Unit("", ())))
    size = 4 << 20
    for ranks, nodes in ((4, 1), (8, 2), (6, 3)):
        local = ranks // nodes
        settings = Settings(stage=0, ranks=ranks, nodes=nodes)
        padded = shape.units[0].flats[0].total_numel(ranks) * 4
        assert padded == pytest.approx(size, rel=1e-3)
        (row,) = traffic(shape, settings)
        assert row.inside_bytes == pytest.approx(2 * padded * (local - 1) / local)
        assert row.between_bytes * local == pytest.approx(2 * padded * (nodes - 1) / nodes)
        compressed = traffic(shape, replace(settings, compression=BlockQuant(4)))[0]
        assert compressed.inside_bytes == row.inside_bytes
        if nodes > 1:
            assert compressed.between_bytes / row.between_bytes == pytest.approx(130 / 1024, rel=1e-5)


def test_stages_move_what_zero_says():
    """Stage 3 where units are gathered moves half as much again as stage 0; stages 1 and 2 as much, or less."""
    shape = shape_of_gpt(1_000_000_000)

    def total(stage: int) -> float:
        return sum(row.inside_bytes for row in traffic(shape, Settings(stage=stage, ranks=4, device="cuda")))

    assert total(2) == pytest.approx(total(0), rel=1e-6)
    assert total(1) == pytest.approx(1.5 * total(0), rel=1e-6)  # its gradients are all-reduced
    assert 1.3 * total(0) < total(3) <= 1.5 * total(0)
    shared = traffic(shape, Settings(stage=3, ranks=4))
    assert sum(row.inside_bytes for row in shared if row.what.startswith("parameters")) == 0


def test_offloaded_state_leaves_the_device():
    shape = shape_of_gpt(10_000_000)
    settings = Settings(stage=3, ranks=2, param_dtype=torch.bfloat16, device="cuda", offload_optimizer="nvme")
    tiers = {holding.kind: holding.tier for holding in memory(shape, settings)}
    assert tiers["optimizer"] == tiers["masters"] == "nvme" and tiers["parameters"] == "device"


@pytest.mark.parametrize("tier", _C.tiers(), ids=lambda tier: tier.device)
def test_plan_knows_every_tier(tier, capsys):
    arguments = ["--params", "1e6", "--param-dtype", "bf16", "--offload-optimizer", tier.device]
    assert program.main(["plan", *arguments]) == 0
    # Beside a model on the CPU, host memory is the memory that computes.
    assert (f"sum, {tier.device}" in capsys.readouterr().out) == (not tier.is_host_memory)
    assert program.main(["plan", *arguments, "--device", "cuda"]) == 0
    assert f"sum, {'host memory' if tier.is_host_memory else tier.device}" in capsys.readouterr().out


@pytest.mark.parametrize("parameters", [1, 1000, 124_000_000, 7_000_000_000, 175_000_000_000])
def test_assumed_shapes_have_the_parameters_that_were_asked_for(parameters):
    assert shape_of_gpt(parameters).parameters == parameters
    assert len(shape_of_gpt(175_000_000_000).units) == pytest.approx(97, abs=3)  # GPT-3 has 96 layers


def test_a_config_gives_the_shape_without_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=100
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    shape = shape_of_config(str(tmp_path))
    whole = transformers.LlamaForCausalLM(config)
    assert shape.parameters == sum(p.numel() for p in whole.parameters())
    assert [unit.name for unit in shape.units] == ["model.layers.0", "model.layers.1", "model.layers.2", ""]
    with pytest.raises(ValueError, match="--model"):
        shape_of_config(str(tmp_path / "missing"))


def test_command_prints_one_plan_a_table_and_json(capsys):
    assert program.main(["plan", "--params", "7e9", "--ranks", "8", "--param-dtype", "bf16"]) == 0
    output = capsys.readouterr().out
    assert "stage 3 on 8 ranks" in output and "masters" in output and "all ranks" not in output
    assert program.main(["plan", "--params", "1B", "--ranks", "1,2", "--stage", "0,3", "--memory", "8G"]) == 1
    table = capsys.readouterr().out
    assert sum(line.endswith("  no") for line in table.splitlines()) == 4 and "stage" in table
    assert program.main(["plan", "--params", "1B", "--ranks", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["parameters"] == 1_000_000_000 and plan["plans"][0]["memory"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give the model's size"),
        (["--params", "1e9", "--model", "x"], "one of them"),
        (["--params", "many"], "'many' is no number"),
        (["--params", "1e9", "--stage", "4"], "expected 0 to 3"),
        (["--params", "1e9", "--nodes", "4", "--ranks", "2"], "each node has at least one rank"),
        (["--params", "1e9", "--param-dtype", "int3"], "'int3'"),
        (["--params", "1e9", "--ranks", "4,6", "--replicas", "4"], "--replicas 4 with --ranks 4,6: expected a divisor"),
        (["--params", "1e9", "--replicas", "2", "--weights", "int8"], "no weights travel encoded"),
        (["--params", "0"], "expected at least one"),
    ],
)
def test_wrong_options_are_one_clear_error(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_:
        program.main(["plan", *arguments])
    assert exit_.value.code == 2 and words in capsys.readouterr().err
