"""`load_state_dict` of a sharded model: whole tensors in, on every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zeropg._native import _C
from zeropg.rank_io.agreement import together
from zeropg.sharding.access import check_replicas, full_parameters
from zeropg.sharding.state import state_of
from zeropg.tensor_parallel.distributed import functions_of, is_distributed, local_of, placements_text
from zeropg.tensor_parallel.pieces import cut_of


def load_into(model: nn.Module, state_dict: dict[str, Any], strict: bool, load_plain: Callable[..., Any]) -> Any:
    """load_state_dict of a sharded model: torch's own for buffers, checks and reports, then the masters themselves.

    load_plain: sets parameters and buffers; it may call load_state_dict of the model, too.
    """
    state = state_of(model, "load_state_dict")
    if state.is_loading:
        return load_plain(state_dict, strict=strict)
    if torch.__future__.get_swap_module_params_on_conversion():
        raise RuntimeError(
            "[zeropg] load_state_dict: torch.__future__.set_swap_module_params_on_conversion(True) would replace "
            "parameters, which hooks and optimizers hold; set it to False"
        )
    state.check_may_write("load_state_dict")
    core: _C.ShardedModule = state.core
    failure: Exception | None = None
    exact: list[tuple[Any, int, torch.Tensor]] = []
    with full_parameters(model, writable=True):
        state.is_loading = True
        try:
            state_dict = _with_parts(model, state_dict)
            result = load_plain(state_dict, strict=strict)
            exact = list(_loaded_as_they_are(core, state_dict))
        except Exception as error:
            failure = error
        finally:
            state.is_loading = False

    def check() -> None:
        if failure is not None:
            raise failure

    together(state.parallel.everybody, "load_state_dict", check)  # a key may be missing on one rank alone
    core.begin_step()
    try:  # a disk that fails on one rank (masters in a tier) is an error on all
        together(state.parallel.everybody, "load_state_dict", lambda: _load_masters(exact))
    finally:
        is_same = core.end_load()
    check_replicas(state, "load_state_dict", is_same)
    return result


def _with_parts(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The dictionary with DTensors for distributed parameters, of this rank's parts of the whole tensors in it.

    DTensors over the same mesh that are placed otherwise are placed as the parameters are; collective over the mesh.
    """
    parts: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = state_dict.get(name)
        if not is_distributed(parameter) or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            continue  # torch says what is wrong with it
        if not is_distributed(value):
            _, over = functions_of(parameter)
            parts[name] = over(cut_of(parameter).of(value.detach()))
        elif value.device_mesh != parameter.device_mesh:  # type: ignore[attr-defined]
            raise ValueError(
                f"[zeropg] load_state_dict: {name!r} is a DTensor over another mesh ({placements_text(value)}) than "
                f"the parameter ({placements_text(parameter)}); expected one over the same mesh, or a whole plain "
                "tensor: pass its full_tensor(), or load through torch.distributed.checkpoint."
            )
        elif value.placements != parameter.placements:  # type: ignore[attr-defined]
            parts[name] = value.redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    if not parts:
        return state_dict
    result = OrderedDict(state_dict)
    result.update(parts)
    if hasattr(state_dict, "_metadata"):  # the modules' versions
        result._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return result


def _loaded_as_they_are(
    core: _C.ShardedModule, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Any, int, torch.Tensor]]:
    """Yields (flat group, slot, value) of the parameters that show the dictionary's values, rounded to their dtype.

    Others have what a module's own loading code or hooks made of them, and keep it.
    """
    for group in core.flat_groups:
        for slot, (names, parameter, _, _) in enumerate(group.slots):
            # As torch does, which copies name after name: the last one stays.
            value = next((state_dict[name] for name in reversed(names) if name in state_dict), None)
            if value is None or value.shape != parameter.shape or is_distributed(value) != is_distributed(parameter):
                continue
            shown, value = local_of(parameter), local_of(value)
            if value.shape == shown.shape and _is_same(shown.detach(), value.detach()):
                yield group, slot, value


def _is_same(shown: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `shown` is, bit for bit, what copy_ makes of `value`."""
    rounded = torch.empty_like(shown).copy_(value)
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (shown, rounded)))


def _load_masters(exact: list[tuple[Any, int, torch.Tensor]]) -> None:
    for group, slot, value in exact:
        group.load(slot, value)
