"""Says what a path holds that is no checkpoint of ours, so that the error can say what to do."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_ARCHIVES = (b"PK\x03\x04", b"\x80\x02")  # torch.save's zip, and its pickles of old


def describe_foreign(path: Path) -> str:
    """Returns a clause such as "it is a DeepSpeed checkpoint; ..."; for a path without a manifest."""
    if path.is_file():
        with suppress(OSError), open(path, "rb") as file:
            if file.read(4).startswith(_ARCHIVES):
                return (
                    "it is a file of torch.save; load it with torch.load(path, weights_only=True) and hand its state "
                    "dict to zeropg.load_full_state_dict"
                )
        if path.suffix == ".safetensors":
            return "it is a safetensors file; load it with safetensors.torch.load_file and zeropg.load_full_state_dict"
        return "it is a file, expected a directory that zeropg.save_checkpoint has written"
    if not path.is_dir():
        return "there is no such directory"
    names = {entry.name for entry in path.iterdir()}
    if any(name.startswith("global_step") for name in names) or any("mp_rank_00" in name for name in names):
        return (
            "it is a DeepSpeed checkpoint; load it with an engine of zeropg.initialize, or make weights of it with "
            "python -m zeropg export"
        )
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return (
            "it is a checkpoint of torch.distributed.checkpoint; load it with "
            "torch.distributed.checkpoint.load(zeropg.dcp_state_dict(model, optimizer), checkpoint_id=...)"
        )
    if "model.safetensors" in names or "model.safetensors.index.json" in names:
        return (
            "it holds exported weights, not a checkpoint; load them with from_pretrained, or with "
            "safetensors.torch.load_file and zeropg.load_full_state_dict"
        )
    if any(name.endswith((".pt", ".pth", ".bin", ".ckpt")) for name in names):
        return (
            "it holds files of torch.save; load one with torch.load(path, weights_only=True) and hand its state dict "
            "to zeropg.load_full_state_dict"
        )
    if any(name.startswith("data-") for name in names):
        return "a save into it never finished, and there was none before"
    return "it is empty" if not names else "it holds no checkpoint"
