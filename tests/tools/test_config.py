"""`python -m zeropg config`: what it prints of a DeepSpeed configuration, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.configs import MS_SWIFT
from zeropg import __main__ as program
from zeropg.deepspeed.config import KEYS


def run(path: Path, config: dict[str, Any], *options: str) -> int:
    path.write_text(json.dumps(config))
    return program.main(["config", str(path), *options])


def test_a_file_that_the_trainer_fills_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    assert run(tmp_path / "zero3.json", MS_SWIFT["zero3"] | {"scheduler": schedule}) == 0
    text = capsys.readouterr().out
    assert "can be used, once 7 keys that are auto are filled." in text
    assert "TrainingArguments.per_device_train_batch_size" in text
    assert text.index("zero_optimization\n  stage ") < text.index("\nfp16\n  enabled ")


def test_what_is_refused_comes_last_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "zero_optimization": {"cpu_offload": True, "zenflow": {"topk_ratio": 0.1}},
        "optimizer": {"type": "Adafactor"},
    }
    assert run(tmp_path / "ds_config.json", config) == 1
    text = capsys.readouterr().out
    table, _, refused = text.partition("ds_config.json cannot be used:")
    assert "offload_optimizer.device" in table and "cpu_offload is deprecated" in table and "zenflow" not in table
    assert "zenflow is" in refused and "Use offload_optimizer" in refused and "Adafactor" in refused


def test_batch_sizes_are_checked_for_so_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"train_batch_size": 24, "gradient_accumulation_steps": 4}
    path = tmp_path / "ds_config.json"
    assert run(path, config) == run(path, config, "--world-size", "2") == 0
    assert "3 samples * 4 forwards * 2 ranks = 24 samples" in capsys.readouterr().out
    assert run(path, config, "--world-size", "5") == 1
    assert "4 * 5 ranks = 20" in capsys.readouterr().out
    assert run(path, {}) == 0 and run(path, {}, "--world-size", "2") == 1
    config["tensor_parallel"] = {"autotp_size": 2}
    assert run(path, config, "--world-size", "4") == 0
    assert "3 samples * 4 forwards * 2 ranks = 24 samples" in capsys.readouterr().out
    assert run(path, config, "--world-size", "3") == 1
    assert "autotp_size is 2, and there are 3 ranks; expected a divisor" in capsys.readouterr().out


def test_programs_get_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"sequence_parallel_size": 2, "train_batch_size": 4, "wandb": {"enabled": True}}
    assert run(tmp_path / "ds_config.json", config, "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["is_usable"] and len(answer["problems"]) == 1
    assert {row["key"]: row["outcome"] for row in answer["keys"]} == {
        "sequence_parallel_size": "refused",
        "train_batch_size": "honoured",
        "wandb.enabled": "honoured",
    }
    assert run(tmp_path / "ds_config.json", {"wandd": {}}, "--json") == 1
    assert "did you mean 'wandb'" in json.loads(capsys.readouterr().out)["problems"][0]


def test_all_keys_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["config", "--keys"]) == 0
    words = capsys.readouterr().out.split()
    assert all((key.partition(".")[2] or key) in words for key in KEYS)


@pytest.mark.parametrize("arguments", [[], ["no_file.json"], ["--keys", "x.json"], ["--world-size"]])
def test_wrong_options_have_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        program.main(["config", *arguments])
    assert caught.value.code == 2
