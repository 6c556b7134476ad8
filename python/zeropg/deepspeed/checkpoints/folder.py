"""Which files a checkpoint of DeepSpeed's consists of, and whether all of them are there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zeropg.checkpoint.manifest import MANIFEST_NAME

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
SCRIPT = "zero_to_fp32.py"
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<part>\d\d)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<part>\d\d)_?optim_states\.pt")
_OTHERS = (
    (re.compile(r"layer_\d+.*expert.*model_states\.pt|expp_rank_.*\.pt"), "experts of a mixture (MoE)"),
    (re.compile(r"layer_\d+-.*model_states\.pt"), "a pipeline's stages"),
)


@dataclass(frozen=True)
class Files:
    """The files of one tag. models: one, or in stage 3 one per rank; optimizers: one per rank, none in stage 0."""

    folder: Path
    models: list[Path]
    optimizers: list[Path]
    has_parts: bool  # whether the model files are each rank's own, as in stage 3

    @property
    def universal(self) -> Path | None:
        """The folder with a folder for each parameter, of a universal checkpoint."""
        return self.folder / "zero" if (self.folder / "zero").is_dir() else None


def holds_deepspeed(folder: Path) -> bool:
    """Whether a folder is a tag that DeepSpeed has written, whole or not.

    Raises ValueError where zeropg has saved into it, too: nobody can say which of the two is meant.
    """
    if not folder.is_dir():
        return False
    names = sorted(path.name for path in folder.iterdir())
    found = next((name for name in names if _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)), None)
    if found is not None and MANIFEST_NAME in names:
        raise ValueError(
            f"'{folder}' holds a checkpoint of zeropg ({MANIFEST_NAME}) and one of DeepSpeed ({found}): move the files "
            "of one of them into another folder"
        )
    return found is not None


def tag_folder(directory: Path, tag: str | None) -> Path:
    """Returns the folder of a tag, by default of the one that `latest` names; `directory` itself where it is one.

    Raises FileNotFoundError, which names the tags that are there.
    """
    if tag is None and holds_deepspeed(directory):
        return directory
    if tag is None:
        latest = next((directory / name for name in (LATEST, LATEST_UNIVERSAL) if (directory / name).is_file()), None)
        if latest is None:
            raise FileNotFoundError(f"'{directory}' has no file '{LATEST}' that names a tag; {_tags(directory)}")
        tag = latest.read_text().strip()
    if not tag or not (directory / tag).is_dir():
        raise FileNotFoundError(f"'{directory}' holds no tag {tag!r}; {_tags(directory)}")
    return directory / tag


def _tags(directory: Path) -> str:
    found = sorted(p.name for p in directory.iterdir() if p.is_dir()) if directory.is_dir() else []
    return f"tags there: {', '.join(found[:10])}" if found else "there are no tags"


def find_files(folder: Path) -> Files:
    """Lists the files of a tag, by rank.

    Raises:
        FileNotFoundError: a rank's file is missing.
        ValueError: the files are of more than one checkpoint, or of a kind that cannot be read.
    """
    names = sorted(path.name for path in folder.iterdir())
    for pattern, what in _OTHERS:
        if found := next((name for name in names if pattern.fullmatch(name)), None):
            raise ValueError(f"'{folder / found}' holds {what}: checkpoints of these cannot be read")
    models = [match for name in names if (match := _MODEL.fullmatch(name))]
    optimizers = [match for name in names if (match := _OPTIMIZER.fullmatch(name))]
    if found := next((match[0] for match in [*models, *optimizers] if match["part"] != "00"), None):
        raise ValueError(f"'{folder / found}' is a part of tensors that were cut (tensor parallelism): not available")
    kinds = {match["rank"] is not None for match in models}
    if len(kinds) == 2:
        raise ValueError(
            f"'{folder}' holds model files of stage 3 and of a lower stage, so two checkpoints were mixed: copy one of "
            "them into an empty folder"
        )
    if not kinds:
        raise FileNotFoundError(f"'{folder}' holds no file ..._model_states.pt: copy the folder again")
    if optimizers and (folder / "zero").is_dir():
        raise ValueError(
            f"'{folder}' holds a universal checkpoint (zero/) and the files of one that is not ({optimizers[0][0]}), "
            "maybe of another step: move one of them into another folder"
        )
    has_parts = kinds.pop()
    by_rank = _by_rank(folder, optimizers, "optimizer")
    model_files = _by_rank(folder, models, "model") if has_parts else [folder / models[0][0]]
    if has_parts and by_rank and len(by_rank) != len(model_files):
        raise FileNotFoundError(
            f"'{folder}' holds model files of {len(model_files)} ranks and optimizer files of {len(by_rank)}: copy the "
            "folder again"
        )
    return Files(folder, model_files, by_rank, has_parts)


def _by_rank(folder: Path, matches: Iterable[re.Match[str]], what: str) -> list[Path]:
    found: dict[int, Path] = {}
    for match in matches:
        rank = int(match["rank"])
        if rank in found:
            raise ValueError(
                f"'{found[rank]}' and '{match[0]}' are {what} files of one rank, so two checkpoints were mixed: copy "
                "one of them into an empty folder"
            )
        found[rank] = folder / match[0]
    for rank in range(len(found)):
        if rank not in found:
            raise FileNotFoundError(
                f"'{folder}' has no {what} file of rank {rank}, but one of rank {max(found)}: copy the folder again"
            )
    return [found[rank] for rank in range(len(found))]
