"""load_pretrained on real ranks: Hugging Face's folders, each rank its own part, and folders that lie."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.spawn import run_ranks

pytest.importorskip("transformers")
import transformers
from safetensors.torch import load_file, save_file

CONFIG = {"n_layer": 2, "n_embd": 48, "n_head": 4, "vocab_size": 101, "n_positions": 32}


def gpt2(seed: int, **more: Any) -> Any:
    """Tied: lm_head.weight is transformer.wte.weight."""
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG, **more))


def bert(seed: int) -> Any:
    torch.manual_seed(seed)
    config = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 99}
    return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=1, **config))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pretrained")
    gpt2(1).save_pretrained(root / "split", max_shard_size="60KB")
    gpt2(1).save_pretrained(root / "single")
    gpt2(1).transformer.save_pretrained(root / "base")
    bert(1).save_pretrained(root / "bert")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(root / "bert" / "model.safetensors").items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(512)[None]  # a buffer that is not saved any more
    shutil.copytree(root / "bert", root / "old")
    save_file(old, root / "old" / "model.safetensors")
    return root


def same_as(model: nn.Module, expected: nn.Module) -> bool:
    import zeropg

    loaded = zeropg.full_state_dict(model, rank0_only=False)
    wanted = expected.state_dict()
    return set(loaded) == set(wanted) and all(torch.equal(loaded[name], value) for name, value in wanted.items())


def load_all(root: str) -> list[str]:
    """Every stage, dtype and folder in one group. Returns what is wrong."""
    import zeropg

    wrong = []
    for stage in range(4):
        for folder, dtype in (("split", None), ("single", torch.bfloat16), ("base", None)):
            model = zeropg.fully_shard(gpt2(2), stage=stage, param_dtype=dtype)
            names = zeropg.load_pretrained(model, Path(root) / folder)
            tokens = torch.arange(8)[None]
            loss = model(input_ids=tokens, labels=tokens).loss.item()
            plain = gpt2(1).to(dtype or torch.float32)(input_ids=tokens, labels=tokens).loss.item()
            if tuple(names) != ([], []) or not same_as(model, gpt2(1)) or abs(loss - plain) > 0.05:
                wrong.append(f"stage {stage}, {folder}, {dtype}: {names}, loss {loss}, expected {plain}")
    for folder in ("bert", "old"):
        model = zeropg.fully_shard(bert(2), stage=3)
        zeropg.load_pretrained(model, str(Path(root) / folder))
        if not same_as(model, bert(1)):
            wrong.append(folder)
    return wrong


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_stage_gets_what_was_saved(folders: Path, world_size: int) -> None:
    assert run_ranks(world_size, load_all, str(folders), timeout=180) == [[]] * world_size


def converted(seed: int) -> dict[str, Any]:
    """Models whose files have other names than they have, or tensors that are merged, split or transposed."""
    torch.manual_seed(seed)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    text = {**small, "vocab_size": 67, "num_key_value_heads": 2}
    mixture = {"num_local_experts": 5, "num_experts_per_tok": 2}
    qwen = {"num_experts": 6, "moe_intermediate_size": 12, "head_dim": 8}
    return {
        "vit": transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=8, patch_size=4)),
        "mixtral": transformers.MixtralForCausalLM(transformers.MixtralConfig(**text, **mixture)),
        "qwen3_moe": transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**text, **qwen)),
    }


class Pair(transformers.PreTrainedModel):  # type: ignore[misc]
    """Has both `norm` and `body.norm`, where `body` is the prefix of a base model."""

    config_class = transformers.PretrainedConfig
    base_model_prefix = "body"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(4)
        self.body = nn.Sequential()
        self.body.add_module("norm", nn.LayerNorm(4))
        self.post_init()


def pair(value: float) -> Pair:
    model = Pair(transformers.PretrainedConfig())
    model.rotary_emb = nn.Module()
    model.rotary_emb.register_buffer("inv_freq", torch.ones(2), persistent=False)
    nn.init.constant_(model.norm.weight, value)
    nn.init.constant_(model.body.norm.weight, value + 1)
    return model


def load_pair(root: str) -> bool:
    import zeropg

    model = zeropg.fully_shard(pair(3.0))
    zeropg.load_pretrained(model, root)
    return same_as(model, pair(7.0))


def test_a_name_of_the_model_is_not_taken_for_one_without_its_prefix(tmp_path: Path) -> None:
    old = {f"layers.{layer}.rotary_emb.inv_freq": torch.ones(2) for layer in range(2)}  # where Llama's once were
    save_file({**pair(7.0).state_dict(), **old}, tmp_path / "model.safetensors")
    assert run_ranks(2, load_pair, str(tmp_path), timeout=180) == [True, True]


def load_converted(root: str) -> list[str]:
    """Returns what is wrong."""
    import zeropg

    wrong = []
    for stage, units in ((3, None), (3, []), (2, None)):
        for name, model in converted(2).items():
            zeropg.fully_shard(model, stage=stage, units=units)
            names = zeropg.load_pretrained(model, Path(root) / name)
            if tuple(names) != ([], []) or not same_as(model, converted(1)[name]):
                wrong.append(f"{name}, stage {stage}, units {units}: {names}")
    model = zeropg.fully_shard(converted(2)["mixtral"])
    for name in ("lacks_an_expert", "twice"):
        try:
            zeropg.load_pretrained(model, Path(root) / name)
            wrong.append(name)
        except ValueError as error:
            wrong.append(str(error))
    return [*wrong, str(same_as(model, converted(2)["mixtral"]))]


def test_what_transformers_converts_on_loading(tmp_path: Path) -> None:
    for name, model in converted(1).items():
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
    model = converted(1)["mixtral"]
    model.save_pretrained(tmp_path / "lacks_an_expert")
    values = load_file(tmp_path / "lacks_an_expert" / "model.safetensors")
    lacking = next(name for name in values if "experts.3." in name and ".w1." in name)
    (tmp_path / "twice").mkdir()
    merged = {"model.layers.0.mlp.experts.gate_up_proj": model.model.layers[0].mlp.experts.gate_up_proj.detach()}
    save_file({**values, **merged}, tmp_path / "twice" / "model.safetensors")
    del values[lacking]
    save_file(values, tmp_path / "lacks_an_expert" / "model.safetensors")
    for lacks, twice, is_as_before in run_ranks(3, load_converted, str(tmp_path), timeout=180):
        assert "transformers cannot make 'model.layers." in lacks and "experts.gate_up_proj' of" in lacks
        assert "both are 'model.layers.0.mlp.experts.gate_up_proj' of the model: which one counts?" in twice
        assert is_as_before == "True"


def load_partly(root: str) -> tuple[bool, list[str], list[str], str]:
    """A head that the files do not have, and a layer that the model does not have."""
    import zeropg

    model = zeropg.fully_shard(gpt2(2), stage=3)
    folder = Path(root) / "odd"
    try:
        zeropg.load_pretrained(model, folder)
        error = ""
    except ValueError as raised:
        error = str(raised)
    is_as_before = same_as(model, gpt2(2))
    missing, unexpected = zeropg.load_pretrained(model, folder, strict=False)
    return is_as_before, missing, unexpected, error


def test_missing_and_unexpected_names_are_said(folders: Path, tmp_path: Path) -> None:
    values = load_file(folders / "single" / "model.safetensors")
    del values["transformer.ln_f.bias"]
    (tmp_path / "odd").mkdir()
    save_file({**values, "extra.weight": torch.zeros(2)}, tmp_path / "odd" / "model.safetensors")
    for is_as_before, missing, unexpected, error in run_ranks(2, load_partly, str(tmp_path), timeout=180):
        assert is_as_before and (missing, unexpected) == (["transformer.ln_f.bias"], ["extra.weight"])
        assert "not in the files: transformer.ln_f.bias; not in the model: extra.weight; strict=False" in error


def load_bad(root: str, names: list[str]) -> list[str]:
    import zeropg

    model = zeropg.fully_shard(gpt2(2), stage=2)
    errors = []
    for name in names:
        try:
            zeropg.load_pretrained(model, Path(root) / name)
            errors.append("no error")
        except (ValueError, FileNotFoundError) as error:
            errors.append(str(error))
    if dist.get_rank() == 1:  # another folder on one rank
        shutil.copytree(Path(root) / "good", Path(root) / "other")
        values = load_file(Path(root) / "other" / "model.safetensors")
        save_file({**values, "one.more": torch.zeros(1)}, Path(root) / "other" / "model.safetensors")
    dist.barrier()
    try:
        zeropg.load_pretrained(model, Path(root) / ("other" if dist.get_rank() == 1 else "good"), strict=False)
        errors.append("no error")
    except ValueError as error:
        errors.append(str(error))
    return [*errors, str(same_as(model, gpt2(2)))]


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_folders_that_lie_are_one_error_on_every_rank(folders: Path, tmp_path: Path) -> None:
    for name in ("short", "lying", "outside", "gone", "misshapen", "pipe"):
        shutil.copytree(folders / "split", tmp_path / name)
    shutil.copytree(folders / "single", tmp_path / "good")
    files = sorted((tmp_path / "short").glob("*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:-100])
    index = "model.safetensors.index.json"
    swapped = {"transformer.wte.weight": files[-1].name}
    rewrite(tmp_path / "lying" / index, lambda text: {"weight_map": text["weight_map"] | swapped})
    rewrite(tmp_path / "outside" / index, lambda text: {"weight_map": {"x": "../good/model.safetensors"}})
    (tmp_path / "gone" / files[0].name).unlink()
    (tmp_path / "pipe" / files[0].name).unlink()
    os.mkfifo(tmp_path / "pipe" / files[0].name)
    for path in (tmp_path / "misshapen").glob("*.safetensors"):
        save_file({name: value.reshape(-1) for name, value in load_file(path).items()}, path)
    shutil.copytree(folders / "single", tmp_path / "untied")
    values = load_file(tmp_path / "untied" / "model.safetensors")
    twin = {"lm_head.weight": values["transformer.wte.weight"] + 1}
    save_file({**values, **twin}, tmp_path / "untied" / "model.safetensors")
    (tmp_path / "nothing").mkdir()
    torch.save({}, tmp_path / "nothing" / "pytorch_model.bin")
    cases = {
        "short": "is damaged or no safetensors file",
        "lying": "says that 'transformer.wte.weight' is in",
        "outside": "which is outside of its folder",
        "gone": "is missing, though the index names it",
        "pipe": "is a pipe, a socket or a device; expected a file",
        "misshapen": "of another shape or kind: transformer.",
        "untied": "tied in the model, but with other values in the files",
        "nothing": "holds no safetensors files: it holds files of torch.save",
        "nowhere": "there is no such directory",
    }
    for found in run_ranks(2, load_bad, str(tmp_path), list(cases), timeout=180):
        for text, words in zip(found, [*cases.values(), "what the files hold (digest) is"], strict=False):
            assert words in text
        assert found[-1] == "True"


def load_two_values(root: str) -> bool:
    import zeropg

    model = zeropg.fully_shard(gpt2(2))
    zeropg.load_pretrained(model, root, strict=False)
    tied = zeropg.full_state_dict(model, rank0_only=False)["lm_head.weight"]
    return torch.equal(tied, load_file(Path(root) / "model-2.safetensors")["lm_head.weight"])


def test_of_two_values_for_a_tied_weight_the_last_one_in_the_files_counts(folders: Path, tmp_path: Path) -> None:
    values = load_file(folders / "single" / "model.safetensors")
    save_file(values, tmp_path / "model-1.safetensors")
    save_file({"lm_head.weight": values["transformer.wte.weight"] + 1}, tmp_path / "model-2.safetensors")
    assert run_ranks(2, load_two_values, str(tmp_path), timeout=180) == [True, True]


def load_unsharded(root: str) -> str:
    import zeropg

    with pytest.raises(ValueError) as raised:
        zeropg.load_pretrained(gpt2(2), root)
    return str(raised.value)


def test_a_model_that_is_not_sharded_is_refused(folders: Path) -> None:
    assert "load_pretrained" in run_ranks(1, load_unsharded, str(folders / "single"), timeout=180)[0]
