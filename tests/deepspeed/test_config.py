"""DeepSpeed's configuration: what is read, filled and refused, and what each key becomes in zeropg's words."""

from __future__ import annotations

import base64
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepspeed.configs import MS_SWIFT, training_arguments
from zeropg import Offload
from zeropg.compression import BlockQuant, Plan
from zeropg.deepspeed.config import (
    KEYS,
    Config,
    ConfigError,
    fill,
    hidden_size_of,
    hugging_face_auto,
    mismatches,
    optimizer_of,
    read,
    scheduler_of,
    sharding_arguments,
)
from zeropg.deepspeed.config.validate import key_paths
from zeropg.deepspeed.muon import Muon
from zeropg.deepspeed.ops.uncorrected_adam import UncorrectedAdam
from zeropg.deepspeed.schedules import WarmupDecayLR
from zeropg.optim import LAMB, Adam, AdamW, Lion, OneBitAdam, OneBitLamb, ZeroOneAdam


def nested(path: str, value: Any) -> dict[str, Any]:
    """ "a.b", 1 -> {"a": {"b": 1}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return dict(value)


def with_batch(config: dict[str, Any]) -> dict[str, Any]:
    return {"train_batch_size": 4, **config}


def problems(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(with_batch(config), world_size=2)
    return str(caught.value)


# --- The registry ---


def test_the_registry_and_the_models_have_the_same_keys() -> None:
    assert set(KEYS) == {key for key, _ in key_paths()}
    assert all(row.does and (row.because == "") == (row.instead == "") for row in KEYS.values())
    wordless = [key for key, row in KEYS.items() if row.fate == "refused" and not row.because]
    assert not wordless


# Values that ask for something, where the opposite of a flag or {"enabled": true} is not one.
ASKING: dict[str, Any] = {
    "gradient_allreduce_op": "sum",
    "sequence_parallel_size": 2,
    "compile": {"deepcompile": True},
    "tensor_parallel.tp": {"tp_size": 2},
    "tensor_parallel.injection_policy_tuple": ["o_proj"],
    "pipeline": {"stages": 2},
    "torch_autocast.dtype": "float16",
    "zero_optimization.offload_param.device": "nvme",
}


def test_what_is_refused_is_refused_with_a_remedy() -> None:
    defaults = dict(key_paths())
    refusing = [key for key, row in KEYS.items() if row.because]
    assert set(ASKING) <= set(refusing)
    for key in refusing:
        value = ASKING.get(key, True if isinstance(defaults[key], bool) else {"enabled": True})
        said = problems(nested(key, value))
        assert key in said and KEYS[key].because in said and KEYS[key].instead in said, said


def test_blocks_that_ask_for_nothing_are_accepted() -> None:
    off = {"enabled": False}
    config = {"elasticity": off, "amp": off, "flops_profiler": off, "data_efficiency": off, "expert_parallel": off}
    config |= {"tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": False}, "wandb": off}
    read(with_batch(config), world_size=2)


def test_a_block_for_torch_compile_is_not_left_out_in_silence() -> None:
    for block in ({"backend": "inductor", "disable": False}, {"enabled": True}, {"backend": "eager"}):
        assert "Call engine.compile()" in problems({"compile": block})
    for block in ({"backend": "inductor", "disable": True}, {"enabled": False, "backend": "eager"}):
        read(with_batch({"compile": block}), world_size=2)


def test_what_accelerate_and_older_files_write_for_no_number_is_none() -> None:
    config = read(
        with_batch({"steps_per_print": float("inf"), "activation_checkpointing": {"number_checkpoints": False}}),
        world_size=2,
    )
    assert config.steps_per_print is None and config.activation_checkpointing.number_checkpoints is None
    assert read('{"train_batch_size": 4, "steps_per_print": Infinity}', world_size=2).steps_per_print is None
    assert "steps_per_print" in problems({"steps_per_print": float("-inf")})


def test_what_has_no_effect_is_said_once_and_only_if_it_asks_for_something(caplog: pytest.LogCaptureFixture) -> None:
    zero = {"contiguous_gradients": True, "overlap_comm": False, "sub_group_size": 1000}
    with caplog.at_level(logging.WARNING, "zeropg"):
        read(with_batch({"zero_optimization": zero}), world_size=2)
    assert [record.message.partition(": without effect")[2] for record in caplog.records] == [
        " here, as python -m zeropg config explains: zero_optimization.overlap_comm, zero_optimization.sub_group_size"
    ]


# --- Where it comes from ---

TEXT = """
{
  // train_batch_size follows
  "train_micro_batch_size_per_gpu": 2, /* of a rank */
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8,}, # a last comma
  "wandb": {"project": "http://host//path # no comment"},
}
"""


def test_a_configuration_is_a_path_a_text_in_base64_or_a_dictionary(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(TEXT)
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000},
        "wandb": {"project": "http://host//path # no comment"},
    }
    before = json.dumps(given)
    encoded = base64.urlsafe_b64encode(before.encode()).decode()
    found = [read(one, world_size=3) for one in (path, str(path), encoded, TEXT, given)]
    assert all(one == found[0] for one in found)
    assert json.dumps(given) == before
    assert found[0].train_batch_size == 6 and found[0].gradient_accumulation_steps == 1
    assert found[0].zero_optimization.reduce_bucket_size == 500_000_000
    assert found[0].wandb.project == "http://host//path # no comment"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"fp16": {"enabled": true, "enabled": false}}', "'enabled' is there more than once in one block"),
        ('{"a": 1\n "b": 2}', r"no JSON in line 2: Expecting ',' delimiter: '\"b\": 2}'"),
        ("[1]", r"has a list; expected an object"),
        ("", "no JSON in line 1"),
        ('{"a": 1,\n', "no JSON in line 1"),  # the error lies behind the last line
    ],
)
def test_what_is_no_configuration_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(path, world_size=1)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'ds_confg.json' is no file, nor JSON in base64"):
        read("ds_confg.json", world_size=1)


# --- Keys and values ---


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"overlap_com": True}}, "did you mean 'zero_optimization.overlap_comm'"),
        ({"stage": 2}, "unknown key 'stage'; did you mean 'zero_optimization.stage'"),
        ({"offload_optimizer": {}}, "did you mean 'zero_optimization.offload_optimizer'"),
        ({"zero_optimization": {"offload_param": {"divice": "cpu"}}}, "mean 'zero_optimization.offload_param.device'"),
        ({"xyzzy": 1}, "unknown key 'xyzzy'; python -m zeropg config --keys lists"),
        ({"train_batch_size": "many"}, "train_batch_size is 'many': input should be a valid integer"),
        ({"train_batch_size": True}, "train_batch_size is True: expected a number, not true or false"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization.stage is 4: input should be 0, 1, 2 or 3"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale is -1"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true; expected one of them"),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}, "param_dtype is 'fp16', but fp16 or bf16"),
        ({"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["bias"]}}, "leave buffer_dtype out"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "without nvme_path"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}, "stage": 2}}, "expected stage 3"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "stage 0, where no weights travel"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True, "mics_shard_size": 2}},
            "mics_shard_size keeps copies of the model",
        ),
        (
            {"zero_optimization": {"mics_shard_size": 2}, "comms_logger": {"enabled": True}},
            "counts one group's operations",
        ),
    ],
)
def test_errors_name_the_key_and_what_was_expected(config: dict[str, Any], message: str) -> None:
    assert message in problems(config)


def test_all_that_is_wrong_is_said_at_once() -> None:
    said = problems({"fp16": {"window": 1}, "stage": 2, "steps_per_print": -1})
    assert said.count("\n  - ") == 3


def test_names_that_are_deprecated_mean_what_they_are_called_now(caplog: pytest.LogCaptureFixture) -> None:
    old = {
        "bfloat16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "cpu_offload": True,
            "cpu_offload_param": True,
            "cpu_offload_use_pin_memory": False,
            "gather_16bit_weights_on_model_save": True,
            "prefetch_bucket_size": 7,
            "zenflow": None,
        },
        "aio": {"thread_count": 2},
    }
    with caplog.at_level(logging.WARNING, "zeropg"):
        config = read(with_batch(old), world_size=2)
    zero = config.zero_optimization
    assert config.bf16.enabled and zero.stage3_gather_16bit_weights_on_model_save and zero.zenflow is None
    assert (zero.offload_optimizer.device, zero.offload_param.device, zero.offload_optimizer.pin_memory) == (
        "cpu",
        "cpu",
        False,
    )
    assert zero.stage3_prefetch_bucket_size == 7 and config.aio.intra_op_parallelism == 2
    assert sum("is deprecated" in record.message for record in caplog.records) == 5
    assert read(with_batch({"zero_optimization": True}), world_size=2).zero_optimization.stage == 1
    assert "are the same key" in problems({"bfloat16": {}, "bf16": {}})
    assert "say the same" in problems({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {}}})


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "expected"),
    [
        (24, 3, 4, (24, 3, 4)),
        (24, 3, None, (24, 3, 4)),
        (24, None, 4, (24, 3, 4)),
        (None, 3, 4, (24, 3, 4)),
        (24, None, None, (24, 12, 1)),
        (None, 3, None, (6, 3, 1)),
        (24, 3, 5, "24, but train_micro_batch_size_per_gpu 3 * gradient_accumulation_steps 5 * 2 ranks = 30"),
        (25, None, None, "25, but train_micro_batch_size_per_gpu 12 * gradient_accumulation_steps 1 * 2 ranks = 24"),
        (24, 5, None, "gradient_accumulation_steps 2 * 2 ranks = 20"),
        (1, None, None, "train_micro_batch_size_per_gpu 0 "),
        (None, None, 4, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
        (None, None, None, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
    ],
)
def test_batch_sizes_follow_from_each_other(
    train: int | None, micro: int | None, accumulation: int | None, expected: tuple[int, int, int] | str
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = dict(zip(names, (train, micro, accumulation), strict=True))
    if isinstance(expected, tuple):
        config = read(given, world_size=2)
        assert tuple(getattr(config, name) for name in names) == expected
    else:
        with pytest.raises(ConfigError, match=expected.replace("*", r"\*")):
            read(given, world_size=2)


# --- "auto" ---


@pytest.mark.parametrize("name", MS_SWIFT)
def test_the_files_of_ms_swift_are_accepted_as_the_trainer_fills_them(name: str) -> None:
    filled = fill(MS_SWIFT[name], hugging_face_auto(training_arguments(), hidden_size=64, num_training_steps=100))
    config = read(filled, world_size=2)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (24, 3)
    assert (config.gradient_clipping, config.bf16.enabled, config.fp16.enabled) == (0.5, True, False)
    arguments = sharding_arguments(config)
    offload = {"offload_optimizer": Offload(device="cpu")} if name.endswith("offload") else {}
    offload |= {"offload_params": "cpu"} if name == "zero3_offload" else {}
    limits = {"prefetch_numel": 3686, "persistent_numel": 640, "max_whole_numel": 10**9}
    limits = limits if name.startswith("zero3") else {}
    assert arguments == {"stage": int(name[4]), "param_dtype": torch.bfloat16} | offload | limits
    if name.startswith("zero3"):
        zero = config.zero_optimization
        assert (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (4096, 3686)
        assert zero.stage3_param_persistence_threshold == 640


def test_auto_is_filled_by_the_trainers_rules_and_nothing_else_is_touched() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6, "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
        "train_batch_size": 8,
    }
    auto = hugging_face_auto(training_arguments(), num_training_steps=100)
    filled = fill(config, auto)
    assert filled["optimizer"]["params"] == {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    assert filled["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_num_steps": 10, "total_num_steps": 100}
    assert filled["train_batch_size"] == 8 and "gradient_clipping" not in filled
    assert config["optimizer"]["params"]["lr"] == "auto"  # type: ignore[index]
    said = mismatches(config, auto)
    assert len(said) == 2 and "train_batch_size is 8" in said[0] and "optimizer.params.eps is 1e-06" in said[1]
    no_warmup = training_arguments(get_warmup_steps=lambda steps: 0)
    assert hugging_face_auto(no_warmup, num_training_steps=10)["scheduler.params.warmup_num_steps"] == 1


def test_hidden_sizes_of_models() -> None:
    class Sizes:
        def __init__(self, **values: Any):
            vars(self).update(values)

    assert hidden_size_of(Sizes(hidden_size=8)) == 8
    assert hidden_size_of(Sizes(hidden_sizes=[8, 32])) == 32
    assert hidden_size_of(Sizes(text_config=Sizes(hidden_size=16))) == 16
    assert hidden_size_of(Sizes()) is None


def test_an_auto_that_nobody_filled_is_refused_or_deepspeeds_default() -> None:
    said = problems(
        {
            "gradient_clipping": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "bf16": {"enabled": "auto"},
            "steps_per_print": "auto",
        }
    )
    assert 'gradient_clipping is "auto", and nobody filled it; expected TrainingArguments.max_grad_norm' in said
    assert "expected TrainingArguments.learning_rate" in said and "expected TrainingArguments.bf16" in said
    assert 'steps_per_print is "auto", and nobody filled it; expected a value of your own' in said
    defaulted = {"zero_optimization": {"reduce_bucket_size": "auto"}, "fp16": {"hysteresis": "auto"}}
    config = read(with_batch(defaulted | {"data_types": {"keep_in_fp32_modules": "auto"}}), world_size=2)
    assert config.zero_optimization.reduce_bucket_size == 500_000_000 and config.fp16.hysteresis == 2


# --- In zeropg's words ---


def config_of(**blocks: Any) -> Config:
    return read(with_batch(blocks), world_size=2)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ({}, {"stage": 0}),
        ({"fp16": {"enabled": True}}, {"stage": 0, "param_dtype": torch.float16}),
        ({"communication_data_type": "bf16"}, {"stage": 0, "reduce_dtype": torch.bfloat16}),
        (
            {"data_types": {"param_dtype": "float16", "buffer_dtype": "torch.bfloat16"}},
            {"stage": 0, "param_dtype": torch.float16, "buffer_dtype": torch.bfloat16},
        ),
        (
            {
                "zero_optimization": {
                    "stage": 1,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pin_memory": False},
                },
                "aio": {"intra_op_parallelism": 2},
            },
            {"stage": 1, "offload_optimizer": Offload(device="nvme", path="/nvme", threads=2, pin_memory=False)},
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "zero_quantized_weights": True}},
            {"stage": 3, "compression": Plan(gradients=BlockQuant(4), weights=BlockQuant(8))},
        ),
        ({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 0}}, {"stage": 3, "prefetch_numel": 0}),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}}, {"stage": 3}),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "stage3_max_live_parameters": 0}},
            {"stage": 3, "keep_numel": sys.maxsize, "max_whole_numel": 0},
        ),
        (
            {"zero_optimization": {"stage": 3, "max_live_parameters": "auto", "param_persistence_threshold": 9}},
            {"stage": 3, "persistent_numel": 9},
        ),
    ],
)
def test_what_fully_shard_is_told(blocks: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sharding_arguments(config_of(**blocks)) == expected


@pytest.mark.parametrize(
    ("optimizer", "made_by", "arguments"),
    [
        ({"type": "Adam", "params": {"lr": 0.1}}, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, torch.optim.AdamW, {"weight_decay": 0.0}),
        (
            {"type": "adam", "params": {"adam_w_mode": False, "betas": [0.8, 0.9], "bias_correction": True}},
            torch.optim.Adam,
            {"betas": (0.8, 0.9), "weight_decay": 0.0},
        ),
        ({"type": "AdamW", "params": {"torch_adam": True, "foreach": False}}, torch.optim.AdamW, {"foreach": False}),
        (
            {"type": "AdamW", "params": {"fp32_optimizer_states": False, "lr": 0.1}},
            AdamW,
            {"lr": 0.1, "state_bits": 16, "weight_decay": 0.0},
        ),
        (
            {"type": "Adam", "params": {"fp32_optimizer_states": False, "adam_w_mode": False}},
            Adam,
            {"state_bits": 16, "weight_decay": 0.0},
        ),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ({"type": "Adagrad"}, torch.optim.Adagrad, {}),
        (
            {"type": "Lamb", "params": {"max_coeff": 0.3, "lr": 0.1}},
            LAMB,
            {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.0, "bounds": (0.01, 0.3), "correction": "lr"},
        ),
        (
            {"type": "Lamb", "params": {"bias_correction": False, "eps_inside_sqrt": True}},
            LAMB,
            {
                "eps": 1e-8,
                "weight_decay": 0.0,
                "bounds": (0.01, 10.0),
                "correction": None,
                "eps_inside_sqrt": True,
            },
        ),
        (
            {"type": "AdamW", "params": {"bias_correction": False, "lr": 0.1}},
            UncorrectedAdam,
            {"adam_w_mode": True, "lr": 0.1},
        ),
        (
            {"type": "Adam", "params": {"bias_correction": False, "adam_w_mode": False}},
            UncorrectedAdam,
            {"adam_w_mode": False},
        ),
        ({"type": "Muon", "params": {"muon_lr": 0.1, "ns_method": "gram"}}, Muon, {"muon_lr": 0.1}),
        ({"type": "Lion", "params": {"betas": [0.9, 0.98]}}, Lion, {"lr": 1e-3, "betas": (0.9, 0.98)}),
        ({"type": "Lion"}, Lion, {"lr": 1e-3, "betas": (0.9, 0.999)}),
        (
            {"type": "OneBitAdam", "params": {"freeze_step": 40, "cuda_aware": False, "comm_backend_name": "mpi"}},
            OneBitAdam,
            {"warmup_steps": 40, "clip": 1.0, "weight_decay": 0.0},
        ),
        (
            {"type": "ZeroOneAdam", "params": {"var_freeze_step": 40, "local_step_scaler": 9, "eps_inside_sqrt": True}},
            ZeroOneAdam,
            {"warmup_steps": 16, "variance_until": 40, "clip": 1.0, "weight_decay": 0.0},
        ),
        (
            {"type": "OneBitLamb", "params": {"freeze_step": 40, "max_coeff": 0.3, "factor_min": 0.7, "lr": 0.01}},
            OneBitLamb,
            {
                "warmup_steps": 40,
                "clip": 1.0,
                "weight_decay": 0.0,
                "eps": 1e-8,
                "lr": 0.01,
                "bounds": (0.01, 0.3),
                "coefficient_beta": 0.9,
                "factor_bounds": (0.7, 4.0),
                "factor_change": 0.1,
            },
        ),
    ],
)
def test_optimizers_have_deepspeeds_defaults(
    optimizer: dict[str, Any], made_by: type[Any], arguments: dict[str, Any]
) -> None:
    made = optimizer_of(config_of(optimizer=optimizer))
    assert made is not None and (made.type, made.arguments) == (made_by, arguments)
    assert isinstance(made([torch.nn.Parameter(torch.zeros(4))]), made_by)


def test_states_in_16_bits() -> None:
    bf16 = {"enabled": True, "bf16_optimizer_states": True}
    for params, made_by in (({"lr": 0.1}, AdamW), ({"lr": 0.1, "adam_w_mode": False}, Adam)):
        made = optimizer_of(config_of(bf16=bf16, optimizer={"type": "Adam", "params": params}))
        assert made is not None and made.type is made_by
        assert made.arguments == {"lr": 0.1, "state_bits": 16, "weight_decay": 0.0}
    for optimizer in (
        {"type": "SGD", "params": {"lr": 0.1}},
        {"type": "Lion"},
        {"type": "AdamW", "params": {"torch_adam": True}},
        {"type": "AdamW", "params": {"fp32_optimizer_states": True}},
    ):
        said = problems({"bf16": bf16, "optimizer": optimizer})
        assert f"bf16_optimizer_states is true, but optimizer.type is {optimizer['type']!r} with state in fp32" in said
    off = config_of(bf16={"enabled": False, "bf16_optimizer_states": True}, optimizer={"type": "AdamW"})
    made = optimizer_of(off)
    assert made is not None and made.type is torch.optim.AdamW, "the block is not in use"


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"optimizer": {"type": "MuSGD"}}, "'MuSGD': it is not torch's"),
        ({"optimizer": {"type": "Lamb", "params": {"amsgrad": True}}}, "amsgrad is True"),
        ({"optimizer": {"type": "OneBitLamb", "params": {"max_coeff": 0.001}}}, "0 <= least <= most"),
        ({"optimizer": {"type": "AdmW"}}, "did you mean 'AdamW'"),
        ({"optimizer": {"type": "AdamW", "params": {"momentumm": 1}}}, "momentumm is unknown to AdamW"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "expected gradient_clipping"),
        (
            {"optimizer": {"type": "AdamW", "params": {"bias_correction": False, "fp32_optimizer_states": False}}},
            "bias_correction is False",
        ),
        ({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 2}}, "expected stage 0 or 1"),
        (
            {"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"zero_quantized_gradients": True}},
            "encodes momenta itself",
        ),
        (
            {
                "optimizer": {"type": "RAdam"},
                "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            },
            "expected one of Adagrad, Adam",
        ),
        ({"scheduler": {"type": "Warmup"}}, "expected one of LRRangeTest"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps is missing"),
        ({"fp16": {"enabled": True, "initial_scale_power": 1024}}, "should be less than or equal to 126"),
    ],
)
def test_updates_that_cannot_be_are_refused_when_they_are_read(blocks: dict[str, Any], message: str) -> None:
    assert message in problems(blocks)


def test_schedules_are_deepspeeds_or_torchs() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
    assert scheduler_of(config_of()) is None and optimizer_of(config_of()) is None
    made = scheduler_of(config_of(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}))
    assert made is not None and isinstance(made(optimizer), WarmupDecayLR)
    made = scheduler_of(config_of(scheduler={"type": "StepLR", "params": {"step_size": 3}}))
    assert made is not None and isinstance(made(optimizer), torch.optim.lr_scheduler.StepLR)
