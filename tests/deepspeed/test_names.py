"""What programs read and set of DeepSpeed's engine and optimizer beside the calls that train."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import re

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed.training import batches, configuration, make_engine, own_parts, train
from tests.sharding.ranks import on_ranks, raises
from tests.small_gpt import loss_of, make_model


@on_ranks(2)
def test_the_optimizer_tells_the_loss_scale_and_overflows() -> None:
    engine = make_engine(2, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    optimizer = engine.optimizer
    assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.overflow) == (16, 16, False)
    assert optimizer.dynamic_loss_scale and optimizer.loss_scaler.cur_scale == engine.cur_scale
    part = own_parts(batches()[0], 1)[0]
    for overflows in (True, False):
        loss = loss_of(engine, part)
        engine.backward(loss * torch.inf if overflows and dist.get_rank() == 1 else loss)
        engine.step()
        assert (optimizer.overflow, engine.was_step_applied()) == (overflows, not overflows)
        assert optimizer.cur_scale == 8 and engine.skipped_steps == 1
    optimizer.loss_scale = 4
    assert engine.cur_scale == 4
    with raises(ValueError, "loss_scale: got 0", "> 0"):
        optimizer.cur_scale = 0
    whole = make_engine(1)
    assert whole.optimizer.loss_scale == 1 and not whole.optimizer.dynamic_loss_scale
    with raises(ValueError, "in fp16 only"):
        whole.optimizer.loss_scale = 2
    inner = whole.optimizer.optimizer
    assert inner.param_groups is whole.optimizer.param_groups and isinstance(inner, torch.optim.AdamW)


@on_ranks(2)
def test_a_configured_key_is_told_under_deepspeeds_name() -> None:
    zero = {"stage": 3, "reduce_bucket_size": 12, "stage3_max_live_parameters": 34, "overlap_comm": True}
    engine = make_engine(
        3,
        gas=2,
        zero_optimization=zero,
        bf16={"enabled": True},
        prescale_gradients=True,
        checkpoint={"tag_validation": "Ignore"},
        wall_clock_breakdown=False,
    )
    expected = {
        "autotp_size": 0,
        "autotuning_enabled": False,
        "bfloat16_enabled": True,
        "checkpoint_tag_validation_enabled": False,
        "checkpoint_tag_validation_fail": True,
        "curriculum_learning_enabled": False,
        "dump_state": False,
        "flops_profiler_profile_step": 1,
        "fp16_enabled": False,
        "get_batch_info": (16, 4, 2),
        "get_data_parallel_rank": dist.get_rank(),
        "get_data_types": (torch.bfloat16, torch.float32),
        "get_model_parallel_rank": 0,
        "get_sequence_parallel_group": None,
        "get_type": [0.0, 0.0],
        "gradient_clipping": 0.5,
        "gradient_predivide_factor": 1.0,
        "initial_dynamic_scale": 2.0**16,
        "is_first_weights_partition_group": True,
        "memory_breakdown": False,
        "postscale_gradients": False,
        "train_micro_batch_size_per_gpu": 4,
        "wall_clock_breakdown": False,
        "zero_cpu_offload": False,
        "zero_max_live_parameters": 34,
        "zero_nvme_offload_optimizer": False,
        "zero_optimization_partition_gradients": True,
        "zero_optimization_partition_weights": True,
        "zero_overlap_comm": True,
        "zero_reduce_bucket_size": 12,
        "zero_sub_group_size": 1_000_000_000,
        "zero_use_cpu_optimizer": False,
    }
    found = {name: getattr(engine, name)() for name in expected}
    assert not (wrong := {name: value for name, value in found.items() if value != expected[name]}), wrong
    assert engine.zero_offload_optimizer().device == "none" and engine.dynamic_loss_scale_args()["min_scale"] == 1
    attributes = {
        "data_parallel_group": dist.group.WORLD,
        "dist_backend": "zeropg",
        "has_moe_layers": False,
        "inside_no_sync_ctxt": False,
        "is_compiled": False,
        "local_rank": dist.get_rank(),
        "losses": None,
        "mp_world_size": 1,
        "mpu": None,
        "pipeline_parallelism": False,
        "seq_dp_world_size": 2,
        "seq_parallel_group": None,
        "sequence_parallel_size": 1,
    }
    told = {name: getattr(engine, name) for name in attributes}
    assert not (wrong := {name: value for name, value in told.items() if value != attributes[name]}), wrong
    names = engine.param_names
    assert names[engine.module.get_parameter("blocks.0.up.weight")] == "blocks.0.up.weight"
    with engine.no_sync():
        assert engine.inside_no_sync_ctxt
    engine.empty_partition_cache()
    engine.eval()
    assert not engine.module.training


@on_ranks(2)
def test_a_model_that_was_built_in_16_bits_tells_its_dtypes() -> None:
    from zeropg import deepspeed

    for stage in (0, 3):
        model = make_model().bfloat16()
        made = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=configuration(stage))
        assert engine.get_data_types() == (torch.bfloat16, torch.float32)


@on_ranks(2)
def test_each_key_is_one_of_the_configuration() -> None:
    from zeropg.deepspeed.configured import ConfiguredEngine

    engine = make_engine(0)
    names = [name for name in vars(ConfiguredEngine) if not name.startswith("_")]
    assert len(names) > 60
    for name in names:
        getattr(engine, name)()


def test_scripts_import_from_deepspeeds_places(capsys: pytest.CaptureFixture[str]) -> None:
    from zeropg import deepspeed
    from zeropg.deepspeed.runtime.lr_schedules import WarmupDecayLR
    from zeropg.deepspeed.runtime.utils import see_memory_usage
    from zeropg.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
    from zeropg.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from zeropg.deepspeed.utils.logging import log_dist, logger

    assert (log_dist, logger) == (deepspeed.log_dist, deepspeed.logger) and deepspeed.dist is deepspeed.comm
    assert WarmupDecayLR.__name__ == "WarmupDecayLR" and OffloadDeviceEnum is deepspeed.zero.OffloadDeviceEnum
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert getattr(parameter, "ds_status", ZeroParamStatus.AVAILABLE) != ZeroParamStatus.NOT_AVAILABLE
    see_memory_usage("not said")
    deepspeed.runtime.utils.see_memory_usage("before the step", force=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"before the step: host \d+\.\d\d GiB", line)


# Of DeepSpeed's documentation and of programs for it, by where the name is ours.
ELSEWHERE = {
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "runtime.activation_checkpointing.checkpointing": "checkpoint",
    "runtime.dataloader": "RepeatingLoader",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.zero": "GatheredParameters",
    "runtime.zero.config": "ZeroStageEnum",
    "runtime.zero.partition_parameters": "register_external_parameter",
    "runtime.zero.stage3": "estimate_zero3_model_states_mem_needs_all_live",
    "runtime.zero.stage_1_and_2": "estimate_zero2_model_states_mem_needs_all_cold",
    "utils.groups": "_get_data_parallel_group",
    "utils.tensor_fragment": "safe_get_full_grad",
    "utils.z3_leaf_module": "set_z3_leaf_modules",
}


@pytest.mark.parametrize(("module", "name"), ELSEWHERE.items())
def test_names_are_where_deepspeed_has_them(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(f"zeropg.deepspeed.{module}"), name)


def test_optimizers_of_deepspeed_begin_with_its_defaults() -> None:
    from zeropg.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from zeropg.deepspeed.ops.lamb import FusedLamb
    from zeropg.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    def defaults(made: torch.optim.Optimizer, *names: str) -> list[object]:
        return [made.param_groups[0][name] for name in names]

    weight = [torch.nn.Parameter(torch.zeros(2, 2))]
    for make in (FusedLion, DeepSpeedCPULion):
        assert defaults(make(weight), "lr", "betas", "weight_decay") == [1e-3, (0.9, 0.999), 0.0]
    lamb = defaults(FusedLamb(weight, max_coeff=0.3), "eps", "weight_decay", "bounds", "correction")
    assert lamb == [1e-8, 0.0, (0.01, 0.3), "lr"]
    assert defaults(DeepSpeedCPUAdagrad(weight), "lr", "eps") == [1e-2, 1e-10]
    with raises(ValueError, "FusedLamb: max_grad_norm=1.0, amsgrad=False"):
        FusedLamb(weight, max_grad_norm=1.0)
    with raises(ValueError, "DeepSpeedCPUAdagrad: amsgrad=True"):
        DeepSpeedCPUAdagrad(weight, amsgrad=True)
    with raises(NotImplementedError, "fp32_optimizer_states=False is not available"):
        DeepSpeedCPULion(weight, fp32_optimizer_states=False)


def test_modules_and_names_that_are_missing_say_what_to_use() -> None:
    from zeropg import deepspeed

    for module, words in {
        "pipe": "torch.distributed.pipelining",
        "moe.layer": "a mixture of experts of your own",
        "ops.op_builder": "builds no operators",
        "profiling.flops_profiler": "the configuration's block flops_profiler",
        "runtime.fp16.loss_scaler": "engine.optimizer.loss_scaler",
        "runtime.pipe.module": "torch.distributed.pipelining",
        "git_version_info": "README.md (From DeepSpeed)",
    }.items():
        with raises(ModuleNotFoundError, f"deepspeed.{module.partition('.')[0]}", words):
            importlib.import_module(f"zeropg.deepspeed.{module}")
    with raises(ImportError, "deepspeed.PipelineModule is not available", "torch.distributed.pipelining"):
        from zeropg.deepspeed import PipelineModule  # noqa: F401
    with raises(AttributeError, "deepspeed.init_inference is not available", "zeropg.full_parameters"):
        deepspeed.init_inference  # noqa: B018
    with raises(AttributeError, "comm.configure is not available", "comms_logger in the configuration"):
        deepspeed.comm.configure  # noqa: B018
    with raises(AttributeError, "zeropg.clip_grad_norm_(engine.module, max_norm)"):
        deepspeed.runtime.utils.clip_grad_norm_  # noqa: B018
    with raises(AttributeError, "utils.groups._get_expert_parallel_group is not available"):
        deepspeed.utils.groups._get_expert_parallel_group  # noqa: B018
    assert not hasattr(deepspeed, "init_inference") and importlib.util.find_spec("no_module_of_this_name") is None


@on_ranks(2)
def test_comm_has_what_deepspeed_adds_to_torch() -> None:
    from zeropg.deepspeed import comm, utils

    rank = dist.get_rank()
    own = torch.full((2,), float(rank + 1))
    whole = torch.zeros(4)
    comm.allgather_fn(whole, own)
    assert whole.tolist() == [1, 1, 2, 2]
    comm.reduce_scatter_fn(part := torch.zeros(2), whole)
    assert part.tolist() == [2 * rank + 2] * 2
    comm.inference_all_reduce(total := own.clone())
    assert total.tolist() == [3, 3]
    for is_async in (False, True):
        outputs = [torch.zeros(4), torch.zeros(2)]
        work = comm.all_gather_coalesced(outputs, [own, own[:1].clone()], async_op=is_async)
        assert (work is not None) == is_async
        if work is not None:
            work.wait()
        assert [one.tolist() for one in outputs] == [[1, 1, 2, 2], [1, 2]]
    with raises(ValueError, "got 1 outputs and 2 inputs"):
        comm.all_gather_coalesced([whole], [own, own])
    assert comm.has_all_gather_into_tensor() and comm.has_reduce_scatter_tensor() and comm.has_all_reduce_coalesced()
    mesh = comm.initialize_mesh_device((2, 1), ("data_parallel", "sequence_parallel"))
    assert (
        mesh.mesh_dim_names == ("data_parallel", "sequence_parallel") and mesh.get_local_rank("data_parallel") == rank
    )
    groups = utils.groups
    assert groups._get_data_parallel_group() is dist.group.WORLD and groups.get_data_parallel_rank() == rank
    assert (groups.get_data_parallel_world_size(), groups._get_sequence_parallel_world_size()) == (2, 1)


@on_ranks(2)
def test_a_whole_engine_generates() -> None:
    from zeropg import deepspeed

    engine = make_engine(3)
    tokens = own_parts(batches()[0], 1)[0][:, :-1]
    with deepspeed.zero.unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
        for _ in range(1 + dist.get_rank()):  # texts of other lengths
            unwrapped.module(tokens)
        assert engine.module.get_parameter("blocks.0.up.weight").sum().isfinite()
    train(engine, batches()[:1])


@on_ranks(2)
def test_a_model_is_built_on_another_device() -> None:
    from zeropg import deepspeed
    from zeropg.deepspeed.utils.init_on_device import OnDevice

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(8.0)
            self.layer = torch.nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
            self.scale = torch.nn.Parameter(torch.full((8,), 0.5, dtype=torch.float64, requires_grad=True))

        def reset_parameters(self) -> None:
            torch.nn.init.constant_(self.scale, 0.5)
            self.count.zero_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x + self.table.to(x.dtype)) * self.scale

    with deepspeed.OnDevice(dtype=torch.bfloat16):
        model = Model()
    assert {(one.dtype, one.device.type) for one in model.parameters()} == {(torch.bfloat16, "meta")}
    assert (model.count.dtype, model.count.device.type) == (torch.int64, "meta") and model.table.device.type == "cpu"
    assert torch.empty(1).device.type == "cpu"
    engine, *_ = deepspeed.initialize(
        model=model, config=configuration(3, bf16={"enabled": True}, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    )
    loss = engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    assert engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean() < loss
    with OnDevice(dtype=torch.float16, device="cpu"), OnDevice(dtype=torch.float16, enabled=False):
        assert (torch.ones(1).dtype, torch.ones(1).device.type) == (torch.float16, "cpu")
    with OnDevice(dtype=None):
        assert torch.ones(1, dtype=torch.float64).dtype == torch.float64 and torch.ones(1, device="cpu").is_cpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a process without a GPU")
def test_the_accelerator_is_this_process_where_there_is_no_gpu() -> None:
    from zeropg import deepspeed

    one = deepspeed.get_accelerator()
    assert one.is_available() and one.device() == torch.device("cpu") and one.is_synchronized_device()
    assert set(one.supported_dtypes()) == {torch.float32, torch.float16, torch.bfloat16}
    one.reset_max_memory_allocated()
    with mmap.mmap(-1, 1 << 26) as block:  # a tensor's memory may stay with the process
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        most = one.max_memory_allocated()
        assert most >= one.memory_allocated() > len(block) and one.memory_stats()["allocated_bytes.all.peak"] >= most
    assert one.memory_allocated() < most <= one.max_memory_reserved()
    assert one.memory_allocated() < one.total_memory() and 0 < one.available_memory() < one.total_memory()
    one.manual_seed(5)
    state, first = one.get_rng_state(), torch.rand(2)
    assert one.initial_seed() == 5 and one.default_generator(0) is torch.default_generator
    one.set_rng_state(state)
    assert torch.equal(torch.rand(2), first) and one.random() is torch.random
    assert one.Stream is None and one.Event is None and one.current_stream() is None
    with one.stream(one.default_stream()), one.capture_to_graph(one.create_graph()):
        one.synchronize()
    one.range_push("step")
    one.range_pop()
    assert one.lazy_call(lambda: 3) == 3 and not one.is_current_stream_capturing()
    assert one.FloatTensor(2, 3).shape == (2, 3) and one.LongTensor([4]).tolist() == [4]
    assert one.on_accelerator(first) and one.pin_memory(first) is first and not one.is_pinned(first)
    one.set_visible_devices_envs(environment := {}, [1, 2])
    assert environment == {"CUDA_VISIBLE_DEVICES": "1,2"} and not one.is_triton_supported()
    one.set_compile_backend("eager")
    assert one.get_compile_backend() == "eager"
    one.set_compile_backend("inductor")
    with raises(ValueError, "got 'none such', expected one of"):
        one.set_compile_backend("none such")
    with raises(AttributeError, "get_op_builder is not available; zeropg builds no operators"):
        one.get_op_builder("CPUAdamBuilder")


@on_ranks(2)
def test_an_engine_stays_in_its_dtype_and_place() -> None:
    for stage in (0, 3):
        engine = make_engine(stage, bf16={"enabled": True})
        assert engine.bfloat16() is engine and engine.to("cpu") is engine.cpu() is engine.to(torch.bfloat16) is engine
        for call in (engine.half, engine.float, engine.double, lambda one=engine: one.to("cpu", torch.float16)):
            with raises(RuntimeError, "is torch.bfloat16, as the configuration", "Cast the model before initialize"):
                call()
        for call in (engine.cuda, lambda one=engine: one.to("meta"), lambda one=engine: one.cuda(0)):
            with raises(RuntimeError, "is on cpu, and shards stay where they are", "before initialize"):
                call()
        with raises(RuntimeError, "a memory format"):
            engine.to(memory_format=torch.channels_last)
        train(engine, batches()[:1])


@on_ranks(2)
def test_what_is_missing_says_what_to_use() -> None:
    from zeropg.deepspeed.unavailable import UNAVAILABLE

    engine = make_engine(0)
    for name, instead in UNAVAILABLE.items():
        with raises(AttributeError, f"engine.{name} is not available", instead):
            getattr(engine, name)
        assert not hasattr(engine, name)
    with raises(AttributeError, "nothing_of_the_kind"):
        engine.nothing_of_the_kind  # noqa: B018


@on_ranks(2)
def test_a_compiled_engine_says_so() -> None:
    engine = make_engine(1)
    engine.compile(backend="eager")
    assert engine.is_compiled
    assert train(engine, batches()[:1]) == pytest.approx(train(make_engine(1), batches()[:1]), rel=1e-6)
