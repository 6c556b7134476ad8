"""QLoRA over `quantize_frozen`: a packed base under PEFT's adapters, in every stage and beside one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spawn import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.transformers.training import llama, texts

ROWS, STEPS = 12, 3  # rows of one step: for 1, 2 and 3 ranks


def adapted(seed: int = 1, format: str = "nf4", **more: Any) -> Any:
    """The same base for every seed, packed; adapters of that seed."""
    import peft

    import zeropg

    base = llama(tie_word_embeddings=False, **more).requires_grad_(False)
    names = zeropg.quantize_frozen(base, format=format)
    assert len(names) == 14 and not any("lm_head" in name for name in names)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():  # zeros at first: so that a merge changes something
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.02)
    return model


def batches(rank: int, ranks: int) -> list[torch.Tensor]:
    rows = torch.stack([row["input_ids"] for row in texts(ROWS * STEPS)])
    return [rows[start : start + ROWS][rank::ranks] for start in range(0, ROWS * STEPS, ROWS)]


def train(model: Any, optimizer: Any, tokens: list[torch.Tensor]) -> list[float]:
    """The loss over all ranks of each step."""
    import torch.distributed as dist

    losses = []
    for each in tokens:
        loss = model(input_ids=each, labels=each).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        if len(each) < ROWS:
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(float(mean))
    return losses


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def differ(a: Any, b: Any, tolerance: float = 1e-5) -> bool:
    return not torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=tolerance)


def in_every_stage(folder: str, format: str) -> list[str]:
    """Returns what is wrong."""
    import torch.distributed as dist

    import zeropg

    wrong: list[str] = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = adapted(format=format)
    expected = train(plain, optimizer_of(plain), batches(0, 1))
    packed_bytes = sum(p.numel() for p in plain.parameters() if p.dtype == torch.uint8)
    other_bytes = sum(p.nbytes for p in plain.parameters() if p.dtype != torch.uint8)
    for stage in range(4):
        model = zeropg.fully_shard(adapted(format=format), stage=stage)
        optimizer = zeropg.shard_optimizer(optimizer_of(model), model)
        losses = train(model, optimizer, batches(rank, ranks)[:2])
        zeropg.save_checkpoint(f"{folder}/{stage}", model, optimizer)
        losses += train(model, optimizer, batches(rank, ranks)[2:])
        if differ(losses, expected):
            wrong.append(f"stage {stage}: losses {losses}, expected {expected}")
        held = model._zeropg.memory_report()["parameters"]
        if held > (packed_bytes + other_bytes) / (ranks if stage == 3 else 1) + 20_000:  # paddings of units
            wrong.append(f"stage {stage}: holds {held} of {packed_bytes} + {other_bytes} bytes")
        again = zeropg.fully_shard(adapted(seed=5, format=format), stage=3 - stage)
        other = zeropg.shard_optimizer(optimizer_of(again), again)
        zeropg.load_checkpoint(f"{folder}/{stage}", again, other)
        if differ(train(again, other, batches(rank, ranks)[2:]), expected[2:]):
            wrong.append(f"stage {stage} to {3 - stage}: resumed")
    # Whole: bytes of the base, values of the adapters. Merged in a model that is packed no more.
    state = zeropg.full_state_dict(again, rank0_only=False)
    whole = adapted(seed=6, format=format)
    whole.load_state_dict(state)
    zeropg.load_full_state_dict(model, state)
    tokens = batches(0, 1)[0]
    logits = whole(input_ids=tokens).logits.detach()
    with torch.no_grad():
        if differ(model(input_ids=tokens).logits, logits):
            wrong.append("load_full_state_dict")
    for merge in (whole.merge_adapter, lambda: whole.merge_and_unload(safe_merge=True)):
        try:
            merge()
            wrong.append("a packed weight was merged")
        except RuntimeError as error:
            if "dequantize_frozen" not in str(error):
                wrong.append(f"merge: {error}")
    zeropg.dequantize_frozen(whole)
    if differ(whole.merge_and_unload()(input_ids=tokens).logits, logits, 1e-4):
        wrong.append("the merged model computes otherwise")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "format"),
    [(3, "nf4"), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, "int4"), (2, "nf4")))],
)
def test_lora_over_a_packed_base_trains_as_in_one_process(ranks: int, format: str, tmp_path: Path) -> None:
    assert run_ranks(ranks, in_every_stage, str(tmp_path), format, timeout=200) == [[]] * ranks


def exported(folder: str) -> list[str]:
    """A packed model without adapters, in files that plain models load. Returns what is wrong."""
    import torch.distributed as dist
    import transformers

    import zeropg

    wrong: list[str] = []
    tokens = batches(0, 1)[0]
    for stage in (0, 3):
        for param_dtype in (None, torch.bfloat16):
            model = llama(tie_word_embeddings=False).requires_grad_(False)
            zeropg.quantize_frozen(model, exclude=("lm_head", "q_proj"))
            model.model.norm.requires_grad_(True)
            ignored = [model.model.layers[0].mlp.up_proj.packed_weight]
            zeropg.fully_shard(model, stage=stage, param_dtype=param_dtype, ignored_params=ignored)
            out = f"{folder}/{stage}-{param_dtype}"
            zeropg.save_16bit_weights(model, out, max_shard_size="20KB")
            plain = llama(tie_word_embeddings=False).requires_grad_(False)
            zeropg.quantize_frozen(plain, exclude=("lm_head", "q_proj"))
            zeropg.dequantize_frozen(plain)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
            wanted = plain.bfloat16().state_dict()
            if {k for k in wanted} != set(loaded.state_dict()):
                wrong.append(f"{out}: names {set(loaded.state_dict()) ^ set(wanted)}")
            elif bad := [name for name, value in loaded.state_dict().items() if not torch.equal(value, wanted[name])]:
                wrong.append(f"{out}: {bad}")
            with torch.no_grad():
                if differ(model(input_ids=tokens).logits.float(), plain(input_ids=tokens).logits.float(), 0.02):
                    wrong.append(f"{out}: logits")
    dist.barrier()
    return wrong


def test_an_export_holds_the_values_of_packed_weights(tmp_path: Path) -> None:
    assert run_ranks(2, exported, str(tmp_path), timeout=100) == [[], []]


def wrapped_by_torchao() -> str:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    import zeropg

    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).requires_grad_(False)
    model.append(torch.nn.Linear(64, 4))
    quantize_(model[0], Int8WeightOnlyConfig())
    try:
        zeropg.fully_shard(model)
    except NotImplementedError as error:
        return str(error)
    return "nothing was raised"


def test_what_torchao_has_wrapped_is_refused_by_name() -> None:
    pytest.importorskip("torchao")
    for message in run_ranks(2, wrapped_by_torchao, timeout=100):
        assert "parameter '0.weight'" in message and "zeropg.quantize_frozen(model)" in message
