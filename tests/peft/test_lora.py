"""PEFT's LoRA under every stage: what trains, is kept, saved and merged, beside plain processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spawn import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.transformers.training import arguments, differ, llama, losses, texts


def lora(seed: int = 1) -> Any:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(seed)
    return peft.get_peft_model(llama(), config)


def batches(rank: int, ranks: int) -> list[torch.Tensor]:
    rows = torch.stack([row["input_ids"] for row in texts(32)])
    return [rows[start : start + 8][rank::ranks] for start in range(0, 32, 8)]


def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> float:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def adapters(model: Any) -> dict[str, torch.Tensor]:
    import peft

    return {name: value.detach().clone() for name, value in peft.get_peft_model_state_dict(model).items()}


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=tolerance) for k in a)


def by_hand(folder: str) -> list[str]:
    """Returns what is wrong."""
    import peft
    import torch.distributed as dist
    import transformers
    from safetensors.torch import load_file

    import zeropg

    wrong: list[str] = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = lora()
    plain_optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    for tokens in batches(0, 1):
        step(plain, plain_optimizer, tokens)
    expected = adapters(plain)
    for stage in range(4):
        model = zeropg.fully_shard(lora(), stage=stage)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = zeropg.shard_optimizer(torch.optim.AdamW(trainable, lr=1e-2), model)
        for index, tokens in enumerate(batches(rank, ranks)):
            if index == 2:
                zeropg.save_checkpoint(f"{folder}/half{stage}", model, optimizer)
            step(model, optimizer, tokens)
        with zeropg.full_parameters(model):
            if not close(adapters(model), expected):
                wrong.append(f"stage {stage}: other adapters than one process has")
            model.save_pretrained(f"{folder}/adapters{stage}", is_main_process=rank == 0)
        held = {name for name, *_ in zeropg.local_shards(model) if ".lora_" not in name}
        state = zeropg.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
        if not held or not state or any(".lora_" not in name for name in state):
            wrong.append(f"stage {stage}: state of {list(state)[:3]}")
        if any(p.grad is not None for p in model.parameters() if not p.requires_grad):
            wrong.append(f"stage {stage}: gradients of the base")

        # Goes on from the middle, in another stage.
        again = zeropg.fully_shard(lora(seed=5), stage=3 - stage)
        other = zeropg.shard_optimizer(
            torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=1.0), again
        )
        zeropg.load_checkpoint(f"{folder}/half{stage}", again, other)
        for tokens in batches(rank, ranks)[2:]:
            step(again, other, tokens)
        with zeropg.full_parameters(again):
            if not close(adapters(again), expected):
                wrong.append(f"stage {stage} to {3 - stage}: resumed")

        # Merged for export, and back.
        before = zeropg.full_state_dict(model, rank0_only=False)
        with zeropg.full_parameters(model, writable=True):
            model.merge_adapter()
        tokens = batches(0, 1)[0]
        with torch.no_grad():
            merged_logits = model(input_ids=tokens).logits
        with zeropg.full_parameters(model, writable=True):
            model.unmerge_adapter()
        after = zeropg.full_state_dict(model, rank0_only=False)
        if not close(before, after):
            wrong.append(f"stage {stage}: merge_adapter and back")
        base = lora()
        base.load_state_dict(after)
        if not torch.allclose(base(input_ids=tokens).logits, merged_logits, atol=1e-4):
            wrong.append(f"stage {stage}: the merged model computes otherwise")
        exported = zeropg.fully_shard(base.merge_and_unload(), stage=stage)
        zeropg.save_16bit_weights(exported, f"{folder}/merged{stage}")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/merged{stage}", dtype=torch.float32)
        if not torch.allclose(loaded(input_ids=tokens).logits, merged_logits, atol=0.1):
            wrong.append(f"stage {stage}: the export computes otherwise")
    dist.barrier()
    if rank == 0:
        for stage in range(4):
            saved = load_file(f"{folder}/adapters{stage}/adapter_model.safetensors")
            if not close(saved, expected):
                wrong.append(f"stage {stage}: save_pretrained")
        attached = peft.PeftModel.from_pretrained(llama(), f"{folder}/adapters3")
        if not close(adapters(attached), expected):
            wrong.append("PeftModel.from_pretrained")
    return wrong


def by_trainer(folder: str) -> list[str]:
    import peft
    import transformers
    from safetensors.torch import load_file

    import zeropg
    from zeropg.transformers import Trainer

    wrong = []
    plain = transformers.Trainer(lora(), arguments(f"{folder}/plain"), train_dataset=texts())
    plain.train()
    for stage in range(4):
        out = f"{folder}/{stage}"
        args = arguments(out, save_strategy="steps", save_steps=2, gradient_checkpointing=stage == 3)
        trainer = Trainer(lora(), args, train_dataset=texts(), zeropg={"stage": stage})
        trainer.train()
        if differ(losses(trainer), losses(plain), 1e-5):
            wrong.append(f"stage {stage}: {losses(trainer)}, expected {losses(plain)}")
        resumed = Trainer(lora(seed=4), arguments(f"{out}/on"), train_dataset=texts(), zeropg={"stage": 3 - stage})
        resumed.train(resume_from_checkpoint=f"{out}/checkpoint-2")
        if differ(losses(resumed), losses(plain), 1e-5):
            wrong.append(f"stage {stage}: resumed {losses(resumed)}")
        resumed.save_model(f"{out}/final")
        zeropg_weights = zeropg.full_state_dict(resumed.model, rank0_only=False)
        trainer.accelerator.wait_for_everyone()
        saved = load_file(f"{out}/final/adapter_model.safetensors")
        attached = peft.PeftModel.from_pretrained(llama(), f"{out}/final")
        if any(".lora_" not in name for name in saved) or not close(attached.state_dict(), zeropg_weights, 0.0):
            wrong.append(f"stage {stage}: save_model wrote {list(saved)[:3]}")
    return wrong


def two_adapters(folder: str) -> list[str]:
    """A frozen second adapter, as DPO's reference, and a buffer that has no short form. Returns what is wrong."""
    import peft
    from safetensors.torch import load_file

    from zeropg.transformers import Trainer

    wrong = []
    model = lora()
    model.add_adapter("reference", peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".reference." in name:
                parameter.fill_(0.5)
    model.set_adapter("default")
    trainer = Trainer(model, arguments(folder, max_steps=1, bf16=True), train_dataset=texts(), zeropg={"stage": 3})
    trainer.train()
    trainer.save_model(f"{folder}/two")
    trainer.accelerator.wait_for_everyone()
    reference = load_file(f"{folder}/two/reference/adapter_model.safetensors")
    if len(reference) != 4 or any(bool((value != 0.5).any()) for value in reference.values()):
        wrong.append(f"the frozen adapter was saved as {list(reference)}")
    trained = load_file(f"{folder}/two/adapter_model.safetensors")
    if len(trained) != 12 or any(".lora_" not in name for name in trained):
        wrong.append(f"the adapter that trains was saved as {list(trained)}")

    whole = llama()
    whole.register_buffer("positions", torch.tensor([100001.5]))
    trainer = Trainer(whole, arguments(folder, max_steps=1, bf16=True), train_dataset=texts(), zeropg={"stage": 3})
    trainer.train()
    trainer.save_model(f"{folder}/whole")
    trainer.accelerator.wait_for_everyone()
    saved = load_file(f"{folder}/whole/model.safetensors")
    if float(saved["positions"]) != 100001.5 or saved["model.embed_tokens.weight"].dtype != torch.bfloat16:
        wrong.append(f"a buffer of fp32 was saved as {saved['positions']}")
    return wrong + prompts(folder) + best_prompts(folder) + generation(folder)


def best_prompts(folder: str) -> list[str]:
    """The best prompts are loaded from what save_only_model has left. Returns what is wrong."""
    import peft

    from zeropg.transformers import Trainer

    wrong = []
    choice = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_only_model": True}
    when = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.1}
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        model = peft.get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
        # The worst is called the best: it is not the one that the model has at the end.
        args = arguments(f"{folder}/best_{kind.__name__}", greater_is_better=True, **choice, **when)
        trainer = Trainer(model, args, train_dataset=texts(32), eval_dataset=texts(8), zeropg={"stage": 3})
        trainer.train()
        history = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        found = trainer.evaluate()["eval_loss"]
        if max(history) == history[-1] or abs(found - max(history)) > 1e-6:
            wrong.append(f"{kind.__name__}: a loss of {found} after {history}")
    return wrong


def generation(folder: str) -> list[str]:
    """PEFT's models generate by their base, which no call of theirs makes whole. Returns what is wrong."""
    from zeropg import deepspeed
    from zeropg.transformers import Trainer

    def by_trainer() -> Any:
        trainer = Trainer(lora(), arguments(folder, max_steps=1), train_dataset=texts(), zeropg={"stage": 3})
        trainer.evaluate(texts(4))
        return trainer.accelerator.unwrap_model(trainer.model_wrapped)

    def by_engine() -> Any:
        adam = {"type": "AdamW", "params": {"lr": 1e-2}}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "optimizer": adam}
        return deepspeed.initialize(model=lora(), config=config)[0]

    tokens = texts(2)[1]["input_ids"][None, :4]
    wanted = lora().eval().generate(input_ids=tokens, max_new_tokens=4, do_sample=False)
    wrong = []
    for make in (by_trainer, by_engine):
        model = make().eval()
        found = model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False)
        wrong += [] if torch.equal(found, wanted) else [f"{make.__name__} generates {found}, not {wanted}"]
        try:
            model.get_input_embeddings().weight.sum()
            wrong.append(f"{make.__name__}: parameters stay whole after a text")
        except RuntimeError:
            model.train()(input_ids=tokens, labels=tokens).loss.backward()
    return wrong


def watch_saves(model: Any, parameter: torch.Tensor) -> list[bool]:
    """A list that says of each save_pretrained to come whether a parameter is whole meanwhile."""
    was_whole = []
    save = model.save_pretrained

    def watched(*args: Any, **kwargs: Any) -> None:
        try:
            parameter.sum()
            was_whole.append(True)
        except RuntimeError:
            was_whole.append(False)
        save(*args, **kwargs)

    model.save_pretrained = watched
    return was_whole


def prompts(folder: str) -> list[str]:
    """Prompt and prefix tuning, whose prompts PEFT takes from the model itself. Returns what is wrong."""
    import peft
    from safetensors.torch import load_file

    import zeropg
    from zeropg.transformers import Trainer

    wrong = []
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        model = peft.get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
        out = f"{folder}/{kind.__name__}"
        args = arguments(out, max_steps=1, save_strategy="steps", save_steps=1)
        trainer = Trainer(model, args, train_dataset=texts(), zeropg={"stage": 3})
        was_whole = watch_saves(model, model.get_parameter("base_model.model.layers.0.mlp.up_proj.weight"))
        trainer.train()
        trainer.accelerator.wait_for_everyone()
        if any(was_whole):
            wrong.append(f"{kind.__name__}: the base was whole")
        whole = zeropg.full_state_dict(model, rank0_only=False)["prompt_encoder.default.embedding.weight"]
        saved = load_file(f"{out}/checkpoint-1/adapter_model.safetensors")
        if list(saved) != ["prompt_embeddings"] or not torch.equal(saved["prompt_embeddings"].view_as(whole), whole):
            wrong.append(f"{kind.__name__}: {list(saved)} were saved")
    return wrong


def test_the_trainer_saves_every_adapter_prompts_and_buffers_in_their_own_dtype(tmp_path: Path) -> None:
    assert run_ranks(2, two_adapters, str(tmp_path), timeout=120) == [[], []]


@pytest.mark.slow
def test_lora_trains_saves_resumes_and_merges_as_in_one_process(tmp_path: Path) -> None:
    assert run_ranks(2, by_hand, str(tmp_path), timeout=120) == [[], []]


@pytest.mark.slow
def test_lora_under_the_trainer_is_the_one_under_ddp(tmp_path: Path) -> None:
    assert run_ranks(2, by_trainer, str(tmp_path), timeout=240) == [[], []]
