"""`zero.GatheredParameters`: whole parameters inside a `with`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.deepspeed.zero.owners import place_of
from zeropg.sharding.access import full_parameters
from zeropg.tensor_parallel.distributed import is_distributed

_WRITES = "inside a `with` that only reads"  # of the error that full_parameters raises for a write


class GatheredParameters:
    """Makes parameters whole on every rank inside the `with`. All ranks must enter and leave, but to read in stages 0
    to 2, where parameters are always whole.

    With the parameters of a sharded model all of that model is whole. Contexts may be nested. Parameters that
    `initialize` has not seen yet are whole anyway.

    Args:
        params: a parameter or an iterable of them.
        modifier_rank: the rank whose writes count; they reach the masters of all ranks at the end. None: the parameters
            are only read, and in stage 3 a write raises RuntimeError (in stages 0 to 2, where parameters are always
            whole, it counts if all ranks write alike).
        fwd_module: without effect: parameters may be used in any module's forward inside the `with`.
        enabled: False: nothing happens.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, nn.Parameter) else list(params)
        self._parameters = list(dict.fromkeys(given)) if enabled else []
        self._modifier_rank = modifier_rank
        self._models = ExitStack()

    def __enter__(self) -> None:
        if self._modifier_rank is not None:
            _refuse_parts(self._parameters)
        places = {id(place.engine): place for parameter in self._parameters if (place := place_of(parameter))}
        with ExitStack() as entered:  # where one cannot be entered, those before are left again
            for place in places.values():
                if place.state.core.stage < 3 and self._modifier_rank is None:
                    place.state.core.join_step()  # nothing else, as in DeepSpeed: a rank may look alone
                    continue
                context = full_parameters(place.engine.module, writable=self._modifier_rank is not None)
                entered.enter_context(context)
            self._models = entered.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        with self._models:  # leaves the models also where a rank is lost
            if self._modifier_rank is not None and dist.is_initialized():
                self._publish(self._modifier_rank)
        if self._modifier_rank is None and _WRITES in str(error[1]):
            raise RuntimeError(
                "[zeropg] GatheredParameters: a parameter is written in a `with` without modifier_rank, where "
                "DeepSpeed forgets it at the end. Pass modifier_rank=, the rank whose writes count; or where all ranks "
                "write alike use zeropg.full_parameters(engine.module, writable=True), and undo inside what must not "
                "stay"
            ) from error[1]
        return None

    @torch.no_grad()
    def _publish(self, source: int) -> None:
        for parameter in self._parameters:
            whole = parameter.detach().contiguous()
            place = place_of(parameter)
            group = None if place is None else place.state.parallel.everybody
            dist.broadcast(whole.view(-1).view(torch.uint8), src=source, group=group)
            if not torch.equal(whole, parameter):
                parameter.copy_(whole)


def _refuse_parts(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if is_distributed(parameter):
            raise NotImplementedError(
                f"[zeropg] GatheredParameters: a parameter of shape {list(parameter.shape)} is cut over ranks "
                "(tensor_parallel), of which modifier_rank has a part; set it whole by "
                "deepspeed.utils.safe_set_full_fp32_param, which all ranks call"
            )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Without effect: a unit is whole, whichever of its modules uses a parameter.

    Across units, name a module that contains both in `set_z3_leaf_modules`, or read the parameter in
    `GatheredParameters`.
    """


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Yields an engine with all of its model whole, so that ranks may generate texts of different lengths. All ranks
    must enter and leave. Raises ValueError where neither an engine nor a sharded model is given."""
    with full_parameters(getattr(model, "module", model)):
        yield model
