"""Checkpoints that load at any world size and stage: `save_checkpoint`, `load_checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from zeropg.checkpoint.load import Loading
from zeropg.checkpoint.load_masters import load_masters
from zeropg.checkpoint.optimizers import Optimizers, named_optimizers
from zeropg.checkpoint.pending import PendingCheckpoint, join_saves
from zeropg.checkpoint.save import OPERATION, Save
from zeropg.rank_io.agreement import check_same, together
from zeropg.rank_io.directory_path import directory_path
from zeropg.sharding.state import unchecked_state_of


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Any = None,
    rank_extra: Any = None,
    async_save: bool = False,
    exclude_frozen: bool = False,
) -> PendingCheckpoint | None:
    """Writes what `load_checkpoint` needs to go on at any world size and stage. All ranks must call.

    The directory holds safetensors files with whole tensors under the model's own names: parameters (the masters, in
    their precision), persistent buffers, and each optimizer state under "name/key"; what each rank's compression still
    owes to the gradients; and a manifest with their places and checksums. Every rank writes its own byte ranges; on
    a mesh that replicates those of the first replica do. Ranks that do not see the directory (no shared file system)
    send their part to rank 0.

    Beside tensor parallelism all ranks of all dimensions save together: the files have the whole tensors that DTensors
    are parts of, each element once, and the manifest says how they were placed. Such a checkpoint loads at any size of
    either dimension, and without tensor parallelism; so does one that was saved without it.

    Saving into the same directory again replaces the checkpoint in it, by one rename after everything is on the disk:
    whoever looks, at any moment and after any crash, finds the older checkpoint whole or the newer one. Until then both
    take up space. To keep several, give each a directory of its own. Other files in the directory stay.

    Args:
        directory: the same on every rank; made if it does not exist.
        model: a module that `fully_shard` has sharded, in any stage.
        optimizer: what `shard_optimizer` returned for the model. Several optimizers, of the same or of different
            classes, are given as a sequence or as a dict by name; their state then stands under "optimizer's
            name/name/key". Those of a sequence are called "0", "1", ...; a sequence of one counts as that one.
        extra: scheduler, scaler, counters ...: nested dicts, lists and tuples of None, bool, int, float, str, tensors
            and numpy arrays. Rank 0's value is saved.
        rank_extra: the same kind of value, one per rank: random states, the sampler's position.
        exclude_frozen: True: parameters that are not trained now are not saved. A load leaves the model's own as they
            are, so it has to have the same ones, as an adapter's base model does.
        async_save: True: copy everything to host memory (as much as this rank's part of the files), return, and write
            in the background. All ranks must see the directory. The next save or load of the model, or in the
            directory, waits for this one, and so does the interpreter's exit. `wait` raises an error of it, or else the
            model's next save or load does. A rank without a sign of life for 60 s, or for the group's timeout where
            that is shorter, is an error.

    Returns:
        With async_save the `PendingCheckpoint`, on which `wait` and `done` can be called; None otherwise.

    Raises:
        TypeError: an argument does not fit; for `extra` the message names the place in the structure.
        ValueError: an argument differs between ranks.
        NotImplementedError: a DTensor is a buffer or one of `ignored_params`, or compression owes something to parts of
            tensors.
        OSError: a file could not be written on some rank; the message names rank, path, offset and errno.
        DistBackendError: a rank died.
        Every rank raises the same error, and the directory holds the checkpoint that it held before.
    """
    state = unchecked_state_of(model, OPERATION)
    save = Save(state, optimizer, exclude_frozen)
    save.announce(directory, extra, rank_extra, async_save)
    pending: PendingCheckpoint | None = None
    try:
        state.settle_writes("save_checkpoint")
        save.create()
        if async_save:
            pending = state.pending_save = PendingCheckpoint(save)
        else:
            save.write_and_commit()
    finally:
        if pending is None:
            save.close()
    return pending


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    strict: bool = True,
) -> tuple[Any, Any]:
    """Sets model and optimizer from what `save_checkpoint` wrote, at any world size and stage. All ranks must call.

    Each rank reads its own byte ranges, and checks the checksums of the chunks that they lie in. Masters, parameters,
    persistent buffers, the optimizer's state and param groups (learning rate and so on) become what they were. What
    compression owes to gradients, and to momenta that ranks average (OneBitAdam), is kept at every world size;
    where the model has replicas, at the same one alone, otherwise with a warning.

    Args:
        directory: seen by every rank, with the same content.
        model: a sharded model with the same names and shapes. Other floating dtypes are cast.
        optimizer: an optimizer of the same class, with the same parameters in each param group; several, each under the
            name by which it was saved. With None the saved state is not read. An optimizer of which nothing was saved
            stays as it is, with a warning.
        strict: False: what the checkpoint has not stays as it is, and what the model has not is left out; shapes, and
            the parameters of param groups, have to fit all the same. True: only what `exclude_frozen` has left out is
            missed, with a warning.

    Returns:
        (extra, rank_extra) as they were passed to `save_checkpoint`, tensors on the CPU. rank_extra is what the rank of
        the same number saved; None on a rank that did not exist then. Rank 0 warns when the world size has changed and
        some rank had saved one.

    Raises:
        FileNotFoundError: no checkpoint there; the message says what is there instead.
        ValueError: the checkpoint is damaged, or of another model or optimizer; the message lists what differs.
        OSError: a file cannot be read.
        Every rank raises the same error. Unless the message says otherwise, the model is as it was.
    """
    return load_parts(directory, model, optimizer, strict=strict)


def load_parts(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None,
    *,
    strict: bool = True,
    reads_model: bool = True,
) -> tuple[Any, Any]:
    """As load_checkpoint. reads_model: False: masters, parameters and buffers stay as they are."""
    state = unchecked_state_of(model, "load_checkpoint")
    group = state.parallel.everybody
    loading: Loading | None = None

    def open_checkpoint() -> dict[str, str]:
        nonlocal loading
        state.check_modules("load_checkpoint")
        state.check_may_write("load_checkpoint")
        state.check_has_own_weights("load_checkpoint")
        named = named_optimizers(optimizer, model, "load_checkpoint")
        loading = Loading(directory_path(directory), state, named, strict=strict, reads_model=reads_model)
        return loading.announcement()

    # Before any rank opens the directory: one that has no part in a save there would find what was there before.
    together(group, "load_checkpoint", lambda: join_saves(state, directory_path(directory)))
    announced = together(group, "load_checkpoint", open_checkpoint)
    assert loading is not None  # otherwise the line above has raised
    opened: Loading = loading
    try:
        check_same(group, "load_checkpoint", announced)
        extras = _together_own(group, opened.read_extras)
        load_masters(state, "load_checkpoint", opened.own_bytes(), opened.read_model, opened.read_optimizers)
    finally:
        opened.close()
    if group.rank() == 0:
        opened.warn()
    return extras


def _together_own(group: dist.ProcessGroup, action: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """As `together`, for a result that stays on this rank."""
    results: list[tuple[Any, Any]] = []
    together(group, "load_checkpoint", lambda: results.append(action()))
    return results[0]
