"""`DeepSpeedConfig`: a configuration under DeepSpeed's attributes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.sharding.ranks import on_ranks
from zeropg import deepspeed
from zeropg.deepspeed.runtime import config_utils
from zeropg.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 12, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
    "checkpoint": {"tag_validation": "Fail"},
    "flops_profiler": {"enabled": True},
    "csv_monitor": {"enabled": True},
}
# As DeepSpeed 0.19.8 says of it in one process, and older versions where it has given a name up.
EXPECTED = {
    "bfloat16_enabled": True,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": True,
    "communication_data_type": torch.float32,
    "data_efficiency_enabled": False,
    "fp16_enabled": False,
    "global_rank": 0,
    "grad_accum_dtype": None,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 1.0,
    "keep_in_fp32_modules": "auto",
    "optimizer_name": "adamw",
    "optimizer_params": {"lr": 0.5},
    "scheduler_name": None,
    "scheduler_params": None,
    "seq_parallel_communication_data_type": torch.float32,
    "steps_per_print": None,
    "torch_autocast_dtype": None,
    "torch_autocast_enabled": False,
    "train_batch_size": 6,
    "train_micro_batch_size_per_gpu": 2,
    "wall_clock_breakdown": True,
    "world_size": 1,
    "zero_enabled": True,
    "zero_optimization_stage": 3,
}


@pytest.mark.parametrize("is_file", [False, True])
def test_it_says_what_deepspeeds_does(is_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    made = deepspeed.DeepSpeedConfig(str(path) if is_file else CONFIG)
    assert {name: getattr(made, name) for name in EXPECTED} == EXPECTED
    assert made.float16_config.initial_scale_power == 16 and made.bfloat16_config.enabled
    zero = made.zero_config
    assert (zero.stage, zero.overlap_comm, zero.max_live_parameters) == (3, True, 12)
    assert zero.offload_param is None and zero.offload_optimizer.device == "cpu"
    assert made.monitor_config.enabled and not made.monitor_config.wandb.enabled
    assert not made.comms_config.comms_logger_enabled and made.timers_config.synchronized
    assert made.aio_config["queue_depth"] == 8 and made.checkpoint_config.writer is None
    with pytest.raises(AttributeError, match=r"DeepSpeedConfig.hybrid_engine is not available.*config.read"):
        made.hybrid_engine  # noqa: B018


def test_it_is_read_as_by_initialize(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="did you mean 'train_batch_size'"):
        DeepSpeedConfig({"train_batch_sise": 4})
    with pytest.raises(ValueError, match="expected the same: leave one of the three out"):
        DeepSpeedConfig(CONFIG | {"train_batch_size": 7})
    assert issubclass(DeepSpeedConfigError, ValueError)
    with caplog.at_level(logging.INFO, logger="zeropg"):
        DeepSpeedConfig(CONFIG).print("DeepSpeedConfig")
    assert "train_batch_size ............. 6" in caplog.text and '"stage": 3' in caplog.text


@on_ranks(2)
def test_batches_are_divided_among_the_ranks_of_data() -> None:
    class Grid:
        def get_data_parallel_world_size(self) -> int:
            return 1

    class Sequences:
        def get_sequence_parallel_world_size(self) -> int:
            return 2

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("sequence_parallel", "data_parallel"))
    found = [DeepSpeedConfig(CONFIG), DeepSpeedConfig(CONFIG, Grid()), DeepSpeedConfig(CONFIG, Sequences())]
    assert [one.train_batch_size for one in found] == [12, 6, 6] and found[0].global_rank == dist.get_rank()
    assert DeepSpeedConfig(CONFIG, mesh_device=mesh).train_batch_size == 6


def test_a_program_has_blocks_of_its_own() -> None:
    class Block(config_utils.DeepSpeedConfigModel):
        size: int = 3

    assert Block(size="auto").size == 3 and Block(size=4).size == 4
    with pytest.raises(ValueError, match="Extra inputs"):
        Block(sise=4)
    with pytest.raises(NotImplementedError, match=r"Old.old is deprecated"):
        from pydantic import Field

        class Old(config_utils.DeepSpeedConfigModel):
            old: int = Field(0, json_schema_extra={"deprecated": True, "new_param": "size"})

    pairs = [("a", 1), ("a", 2)]
    with pytest.raises(ValueError, match="'a' is there more than once"):
        json.loads('{"a": 1, "a": 2}', object_pairs_hook=config_utils.dict_raise_error_on_duplicate_keys)
    assert config_utils.dict_raise_error_on_duplicate_keys(pairs[:1]) == {"a": 1}
    assert config_utils.get_scalar_param({"a": 1}, "b", 2) == 2
