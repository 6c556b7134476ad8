"""Checkpoints of an engine: a folder per tag, and `latest`, which names the last one."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zeropg.checkpoint.checkpoint import load_parts, save_checkpoint
from zeropg.checkpoint.state_dict import full_state_dict
from zeropg.deepspeed.checkpoints import recovery_script
from zeropg.deepspeed.checkpoints.contents import Contents
from zeropg.deepspeed.checkpoints.folder import LATEST, LATEST_UNIVERSAL, SCRIPT, holds_deepspeed
from zeropg.deepspeed.checkpoints.load import load_deepspeed
from zeropg.deepspeed.checkpoints.state_dict import read_state_dict
from zeropg.deepspeed.config import Config
from zeropg.deepspeed.loss_scaler import LossScaler
from zeropg.deepspeed.schedules import check_schedule
from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.rank_io.agreement import broadcast_text, check_same, together
from zeropg.rank_io.directory_path import directory_path
from zeropg.sharding.load_state_dict import load_into
from zeropg.sharding.state import ShardedState

LOGGER = logging.getLogger("zeropg")

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class _How(NamedTuple):
    """Which parts of a checkpoint are loaded, and how."""

    strict: bool
    loads_scheduler: bool
    reads_model: bool


class EngineCheckpoints:
    """The part of DeepSpeedEngine that writes and reads files. All ranks must call each of its methods."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    global_steps: int
    global_samples: int
    skipped_steps: int
    _config: Config
    _everybody: dist.ProcessGroup
    _scaler: LossScaler
    _state: ShardedState

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes model, optimizer, scheduler, loss scale and counters into `save_dir/tag`.

        The folder is one of `zeropg.save_checkpoint`: it loads at any world size and stage, right away too, and holds
        no pickle. Gradients that are accumulated stay where they are and are not saved. Beside it comes
        `save_dir/zero_to_fp32.py`, which writes fp32 weights of it.

        Args:
            tag: the same on every rank; default: "global_step" and the number.
            client_state: rank 0's is saved: nested dicts, lists and tuples of None, bool, int, float, str and tensors.
            save_latest: whether `save_dir/latest` names this tag afterwards. It is written last, by one rename.
            exclude_frozen_parameters: parameters that are not trained are not saved. A load leaves the model's own as
                they are, with a warning: it has to be built with the same ones.

        Returns True.

        Raises:
            TypeError: the client state, or the scheduler's, holds something else; the message says where.
            ValueError: tags differ between ranks, one is empty, or the tag's folder holds a checkpoint of DeepSpeed.
            OSError: a file cannot be written; what was there before stays.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        directory = _path(save_dir)

        def announce() -> dict[str, str]:
            _check_tag(name)
            if holds_deepspeed(directory / name):
                raise ValueError(
                    f"'{directory / name}' holds a checkpoint of DeepSpeed, which a save leaves as it is: save with "
                    "another tag or into another directory, or remove that one"
                )
            return {"tag": name, "save_dir": str(directory)}

        check_same(self._everybody, "save_checkpoint", together(self._everybody, "save_checkpoint", announce))
        extra = {
            "client_state": {} if client_state is None else client_state,
            "lr_scheduler": {} if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "loss_scale": self._scaler.state_dict(),
            "counters": {key: getattr(self, key) for key in _COUNTERS},
        }
        save_checkpoint(
            directory / name,
            self.module,
            self.optimizer,
            extra={"deepspeed": extra},
            exclude_frozen=exclude_frozen_parameters,
        )

        def write_beside() -> None:
            if self._everybody.rank() == 0:
                _replace(directory / SCRIPT, _write_script)
                if save_latest:
                    _replace(directory / LATEST, lambda file: file.write_text(name))

        together(self._everybody, "save_checkpoint", write_beside)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Takes over what `save_checkpoint` or DeepSpeed wrote, on any number of ranks and in any stage.

        Gradients that were accumulated are dropped, and accumulation begins anew. DeepSpeed's pickles are read as data:
        what else they ask for is refused, not run.

        Args:
            tag: default: the one that `load_dir/latest` names; with checkpoint.load_universal, `latest_universal`.
            load_module_strict: False: tensors that are missing in the checkpoint keep their values, and others there
                are ignored; a warning names the missing ones. True: names have to fit, but for frozen parameters that
                were left out at the save.
            load_optimizer_states, load_lr_scheduler_states: False: those stay as they are.
            load_module_only: neither optimizer, scheduler, loss scale nor counters.
            custom_load_fn: called as custom_load_fn(src=, dst=) instead of loading the model: src has the checkpoint's
                whole tensors by name, masters in fp32, on the CPU of every rank, and dst is the model, whose parameters
                are whole and may be written, alike on every rank. Optimizer states and the rest are loaded as always.

        Returns:
            (the folder, client_state); (None, None), with a warning, where there is neither a tag nor a `latest`. With
            load_lr_scheduler_states False, DeepSpeed's client_state holds "lr_scheduler", as with DeepSpeed itself.

        Raises:
            FileNotFoundError: there is no such tag, or a file of it is missing.
            ValueError: the checkpoint is damaged, of another model or scheduler, mixed from several, or was not saved
                by an engine; or the tag is empty.
            Exception: what custom_load_fn raises, on every rank.
        """
        directory = _path(load_dir)
        latest = LATEST_UNIVERSAL if self._config.checkpoint.load_universal else LATEST
        if tag is not None:
            together(self._everybody, "load_checkpoint", lambda: _check_tag(str(tag)))
        name = self._latest(directory, latest) if tag is None else str(tag)
        if not name:
            if self._everybody.rank() == 0:
                LOGGER.warning("[zeropg] load_checkpoint: '%s' has no file '%s'; nothing is loaded", directory, latest)
            return None, None
        optimizer = self.optimizer if load_optimizer_states and not load_module_only else None
        loads_scheduler = load_lr_scheduler_states and not load_module_only and self.lr_scheduler is not None
        how = _How(load_module_strict, loads_scheduler, reads_model=custom_load_fn is None)
        is_deepspeeds = self._is_deepspeeds(directory / name)
        if is_deepspeeds:
            saved = self._load_deepspeed(directory / name, optimizer, how)
            if not load_lr_scheduler_states:
                saved["client_state"]["lr_scheduler"] = saved["lr_scheduler"]
        else:
            saved = self._load_own(directory / name, optimizer, how)
        if custom_load_fn is not None:
            self._load_by(custom_load_fn, directory / name, is_deepspeeds=is_deepspeeds)
        self.module.zero_grad(set_to_none=True)
        if not load_module_only:
            self._scaler.load_state_dict(saved["loss_scale"])
            for key in _COUNTERS:
                setattr(self, key, saved["counters"][key])
            if loads_scheduler:
                self._load_scheduler(saved["lr_scheduler"], has_rates=optimizer is not None)
        self._begin_accumulation()
        return str(directory / name), saved["client_state"]

    def _load_by(self, load: Callable[..., Any], folder: Path, *, is_deepspeeds: bool) -> None:
        """Lets the program set the model from a checkpoint. Collective."""
        source: dict[str, torch.Tensor] = {}
        read = lambda: source.update(read_state_dict(folder, is_deepspeeds=is_deepspeeds))  # noqa: E731
        together(self._everybody, "load_checkpoint", read)
        load_into(self.module, source, True, lambda state_dict, strict: load(src=state_dict, dst=self.module))

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Sets the model from `checkpoint["module"]`, whole tensors by name, the same on every rank.

        Args:
            strict, custom_load_fn: as load_checkpoint's.
            fetch_z3_params: without effect: values of sharded parameters are always whole ones.

        Raises RuntimeError, on every rank, for names or shapes that do not fit, and ValueError for a dictionary
        without "module".
        """
        if not isinstance(checkpoint, dict) or "module" not in checkpoint:
            raise ValueError(
                '[zeropg] load_module_state_dict: expected {"module": the weights by name}; for the weights alone call '
                "engine.module.load_state_dict(weights)"
            )
        state_dict = checkpoint["module"]
        if custom_load_fn is None:
            self.module.load_state_dict(state_dict, strict=strict)
        else:
            by_program = custom_load_fn
            load_into(self.module, state_dict, strict, lambda src, strict: by_program(src=src, dst=self.module))

    def _load_own(self, folder: Path, optimizer: torch.optim.Optimizer | None, how: _How) -> dict[str, Any]:
        extra, _ = load_parts(folder, self.module, optimizer, strict=how.strict, reads_model=how.reads_model)
        if not isinstance(extra, dict) or "deepspeed" not in extra:
            raise ValueError(
                f"[zeropg] load_checkpoint: '{folder}' was saved by zeropg.save_checkpoint, not by an engine; the "
                "model is loaded, use zeropg.load_checkpoint(directory, engine.module, engine.optimizer)"
            )
        saved: dict[str, Any] = extra["deepspeed"]
        if how.loads_scheduler:
            try:
                self._check_schedule(saved["lr_scheduler"])
            except ValueError as error:
                raise ValueError(f"[zeropg] load_checkpoint: {error}; model and optimizer are loaded") from error
        return saved

    def _load_deepspeed(self, folder: Path, optimizer: torch.optim.Optimizer | None, how: _How) -> dict[str, Any]:
        def check(contents: Contents) -> None:
            if how.loads_scheduler:
                self._check_schedule(contents.lr_scheduler)

        assert optimizer is None or isinstance(optimizer, ShardedOptimizer)  # `initialize` has made it
        contents = load_deepspeed(
            folder, self.module, optimizer, strict=how.strict, reads_model=how.reads_model, check=check
        )
        return {
            "loss_scale": contents.loss_scale,
            "counters": contents.counters,
            "lr_scheduler": contents.lr_scheduler,
            "client_state": contents.client_state,
        }

    def _is_deepspeeds(self, folder: Path) -> bool:
        """Whether DeepSpeed has written a tag's folder. Raises where the ranks see different things."""
        key = "what wrote the checkpoint"  # each rank may have a folder of another name
        look = lambda: {key: _writer_of(folder)}  # noqa: E731
        seen = together(self._everybody, "load_checkpoint", look)
        without = [rank for rank, entry in enumerate(seen) if entry[key] == "nobody"]
        if 0 < len(without) < len(seen):
            raise FileNotFoundError(
                f"[zeropg rank {self._everybody.rank()}/{self._everybody.size()}] load_checkpoint: rank "
                f"{', '.join(map(str, without))} finds no checkpoint where others do; on this rank the folder is "
                f"'{folder}'. Put the checkpoint where every rank reads it, or pass each rank the folder that it has"
            )
        check_same(self._everybody, "load_checkpoint", seen)
        return bool(seen[0][key] == "DeepSpeed")

    def _check_schedule(self, saved: dict[str, Any]) -> None:
        try:
            check_schedule(saved, self.lr_scheduler)
        except ValueError as error:
            raise ValueError(f"{error}, or pass load_lr_scheduler_states=False") from None

    def _load_scheduler(self, saved: dict[str, Any], *, has_rates: bool) -> None:
        """has_rates: whether the param groups have those of the checkpoint already."""
        if not saved:
            if self._everybody.rank() == 0:
                LOGGER.warning("[zeropg] load_checkpoint: it was saved without a scheduler; yours stays as it is")
            return
        self.lr_scheduler.load_state_dict(saved)
        if has_rates or self.optimizer is None or not hasattr(self.lr_scheduler, "get_last_lr"):
            return
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Returns the model's state dict without communication: any rank may call this one alone.

        In stage 3 its parameters raise when their values are read; `zeropg.full_state_dict(engine.module)` has those.
        """
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name in _frozen(self.module) if exclude_frozen_parameters else ():
            state.pop(prefix + name, None)
        return state

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Returns whole CPU tensors in the dtype that the model computes in, on rank 0; None elsewhere.

        Raises ValueError below stage 3, as DeepSpeed does.
        """
        if self._state.core.stage < 3:
            raise ValueError(
                f"[zeropg] _zero3_consolidated_16bit_state_dict: the stage is {self._state.core.stage}, expected 3; "
                "use zeropg.full_state_dict(engine.module)"
            )
        return self._whole(exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights in the dtype that the model computes in, as one file that torch.load reads.

        Args:
            save_filename: as DeepSpeed's it holds a pickle of tensors alone, for torch.load(weights_only=True).

        Returns:
            False, and nothing is written, in stage 3 without stage3_gather_16bit_weights_on_model_save.

        Raises:
            ValueError: `save_filename` names a file of safetensors, which a pickle is not.

        `zeropg.save_16bit_weights(engine.module, directory)` writes safetensors, and needs no memory for the whole
        model on rank 0.
        """
        if str(save_filename).endswith(".safetensors"):
            raise ValueError(
                f"[zeropg] save_16bit_model: save_filename is {str(save_filename)!r}, but what is written is a pickle "
                "for torch.load; expected a name such as 'pytorch_model.bin'. For safetensors call "
                "zeropg.save_16bit_weights(engine.module, directory)"
            )
        gathers = self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save
        if self._state.core.stage >= 3 and not gathers:
            if self._everybody.rank() == 0:
                LOGGER.warning(
                    "[zeropg] save_16bit_model: nothing is written, since the configuration says "
                    "stage3_gather_16bit_weights_on_model_save false"
                )
            return False
        weights = self._whole(exclude_frozen_parameters)
        directory = _path(save_dir)

        def write() -> None:
            if weights is not None:
                directory.mkdir(parents=True, exist_ok=True)
                _replace(directory / save_filename, lambda file: torch.save(weights, file))

        together(self._everybody, "save_16bit_model", write)
        return True

    save_fp16_model = save_16bit_model

    def empty_partition_cache(self) -> None:
        """Nothing to free: whole parameters are let go after each unit's forward and backward."""

    def _whole(self, exclude_frozen_parameters: bool) -> dict[str, torch.Tensor] | None:
        weights = full_state_dict(self.module, dtype=self._state.param_dtype)
        for name in _frozen(self.module) if exclude_frozen_parameters else ():
            weights.pop(name, None)
        return weights if self._everybody.rank() == 0 else None

    def _latest(self, directory: Path, file: str) -> str:
        """What rank 0 finds in the file that names a tag; "" where there is none."""
        found: list[str] = []

        def look() -> None:
            if self._everybody.rank() == 0 and (directory / file).is_file():
                found.append((directory / file).read_text().strip())

        together(self._everybody, "load_checkpoint", look)
        return broadcast_text(self._everybody, "load_checkpoint", found[0] if found else None)

    def _begin_accumulation(self) -> None:
        raise NotImplementedError


def _frozen(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad]


def _check_tag(name: str) -> None:
    if not name.strip("./ "):
        raise ValueError(f"the tag is {name!r}; expected the name of a folder inside the directory, or None")


def _writer_of(folder: Path) -> str:
    if not folder.is_dir():
        return "nobody"
    return "DeepSpeed" if holds_deepspeed(folder) else "zeropg"


def _path(directory: str | os.PathLike[str]) -> Path:
    try:
        return directory_path(directory)
    except ValueError as error:
        raise ValueError(f"[zeropg] checkpoint: {error}") from None


def _write_script(path: Path) -> None:
    path.write_bytes(Path(recovery_script.__file__).read_bytes())
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file so that whoever looks finds the older one or the newer one, whole."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
