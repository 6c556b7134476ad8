"""`python -m zeropg export` and `zero_to_fp32`: weights out of checkpoints, ours and DeepSpeed's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.deepspeed.foreign_files import Training, write_checkpoint, write_universal
from tests.deepspeed.test_foreign_checkpoint import Evil, make, training
from tests.sharding.ranks import on_ranks
from zeropg import __main__ as program


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def pickled(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.bin"))
    return {n: v for path in files for n, v in torch.load(path, weights_only=True).items()}


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def weights_of(job: Training) -> dict[str, torch.Tensor]:
    return job.buffers | job.parameters


@pytest.mark.parametrize("kind", [0, 1, 2, 3, "universal"])
def test_deepspeeds_become_safetensors(tmp_path: Path, kind: Any) -> None:
    job = training()
    if kind == "universal":
        write_universal(tmp_path / "in", job, world_size=3)
    else:
        write_checkpoint(tmp_path / "in", job, stage=kind, world_size=3)
    (tmp_path / "in" / "config.json").write_text('{"hidden_size": 6, "torch_dtype": "float32"}')
    assert program.main(["export", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    check_same(exported(tmp_path / "out"), weights_of(job))
    narrow = tmp_path / "narrow"
    sizes = ["--dtype", "bfloat16", "--max-shard-size", "150"]
    assert program.main(["export", str(tmp_path / "in"), str(narrow), *sizes]) == 0
    check_same(exported(narrow), {n: v.bfloat16() if v.is_floating_point() else v for n, v in weights_of(job).items()})
    index = json.loads((narrow / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights_of(job).keys() and len(set(index["weight_map"].values())) > 1
    assert json.loads((narrow / "config.json").read_text()) == {"hidden_size": 6, "torch_dtype": "bfloat16"}


def test_what_would_be_written_is_listed_without_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = training()
    write_checkpoint(tmp_path / "in", job, stage=2, world_size=2)
    assert program.main(["export", str(tmp_path / "in"), "--list"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert weights_of(job).keys() <= listed and [path.name for path in tmp_path.iterdir()] == ["in"]
    with pytest.raises(SystemExit) as stopped:
        program.main(["export", str(tmp_path / "in")])
    assert stopped.value.code == 2 and "expected OUT" in capsys.readouterr().err


def test_zero_to_fp32_writes_the_files_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = training()
    write_checkpoint(tmp_path / "in", job, stage=3, world_size=2)
    arguments = ["zero_to_fp32", str(tmp_path / "in")]
    tied = {name: job.parameters[kept] for name, kept in job.tied.items()}
    assert program.main([*arguments, str(tmp_path / "bin"), "-t", "global_step7"]) == 0
    check_same(pickled(tmp_path / "bin"), weights_of(job) | tied)
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["pytorch_model.bin"]
    assert program.main([*arguments, str(tmp_path / "cut"), "--max_shard_size", "300"]) == 0
    check_same(pickled(tmp_path / "cut"), weights_of(job) | tied)
    index = json.loads((tmp_path / "cut" / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"]["head.weight"] == index["weight_map"]["embedding.weight"]
    for more in (["--max_shard_size", "500"], ["--max_shard_size", "300"], []):  # over an older one of other files
        assert program.main([*arguments, str(tmp_path / "cut"), *more]) == 0
        check_same(pickled(tmp_path / "cut"), weights_of(job) | tied)
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["pytorch_model.bin"]
    safe = [*arguments, str(tmp_path / "safe"), "--safe_serialization", "--exclude_frozen_parameters"]
    assert program.main(safe) == 0
    check_same(exported(tmp_path / "safe"), {n: v for n, v in weights_of(job).items() if n not in job.frozen})
    capsys.readouterr()
    assert program.main([*arguments, str(tmp_path / "safe")]) == 1, "safetensors would go on being loaded"
    assert "model.safetensors' is there, which from_pretrained prefers" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "safe").iterdir()] == ["model.safetensors"]


def test_an_export_that_fails_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "in", training(), stage=3, world_size=2)
    arguments = ["zero_to_fp32", str(tmp_path / "in"), str(tmp_path / "out"), "--max_shard_size", "300"]
    assert program.main(arguments) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(tensors: dict[str, torch.Tensor], file: Any, save: Any = torch.save) -> None:
        if "norm.weight" in tensors:
            raise OSError("no space left")
        save({name: tensor + 1 for name, tensor in tensors.items()}, file)

    monkeypatch.setattr(torch, "save", full)
    assert program.main(arguments) == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_fp32_of_what_is_stored_in_16_bits_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = training()
    job.parameters = {name: value.bfloat16() for name, value in job.parameters.items()}
    write_checkpoint(tmp_path / "in", job, stage=0, world_size=1)
    assert program.main(["zero_to_fp32", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "warning: " in (text := capsys.readouterr().err) and "stored in 16 bits" in text


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "in", training(), stage=2, world_size=2)

    def message(checkpoint: Path, *more: str) -> str:
        assert program.main(["export", str(checkpoint), str(tmp_path / "out"), *more]) == 1
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and not (tmp_path / "out").exists()
        return text

    assert "holds no tag 'best'; tags there: global_step7" in message(tmp_path / "in", "--tag", "best")
    assert "is no directory" in message(tmp_path / "nothing")
    (folder / "zeropg_checkpoint.json").touch()
    for which in (tmp_path / "in", folder):
        assert "a checkpoint of zeropg (zeropg_checkpoint.json) and one of DeepSpeed" in message(which)
    (folder / "zeropg_checkpoint.json").unlink()
    (tmp_path / "in" / "latest").unlink()
    assert "has no file 'latest' that names a tag; tags there: global_step7" in message(tmp_path / "in")
    torch.save({"module": {}, "more": Evil(tmp_path / "was_run")}, folder / "mp_rank_00_model_states.pt")
    assert "posix.system" in message(folder) and not (tmp_path / "was_run").exists()
    (tmp_path / "readme").mkdir()
    (tmp_path / "readme" / "model.txt").touch()
    assert "has no file 'latest'" in message(tmp_path / "readme")


@on_ranks(2, timeout=120)
def test_ours_become_the_same_as_full_state_dict() -> None:
    import zeropg
    from tests.deepspeed.training import shared_folder

    with shared_folder() as shared:
        folder = Path(shared)
        engine = make(3)
        engine.save_checkpoint(folder / "engine")
        zeropg.save_checkpoint(folder / "plain", engine.module)
        expected = zeropg.full_state_dict(engine.module)
        if not expected:
            return
        expected.pop("head.weight")
        for name in ("engine", "plain"):
            assert program.main(["export", str(folder / name), str(folder / f"{name}-out")]) == 0
            check_same(exported(folder / f"{name}-out"), expected)
        assert program.main(["zero_to_fp32", str(folder / "engine"), str(folder / "bin")]) == 0
        check_same(pickled(folder / "bin"), expected | {"head.weight": expected["embedding.weight"]})
