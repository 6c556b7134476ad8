"""Which modules of a model are units, and which parameters each of them holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

# What a caller may give as a unit: a submodule, its name, or a class all of whose instances are meant.
UnitChoice = nn.Module | str | type[nn.Module]


@dataclass
class UnitPlan:
    """One unit: its module and the parameters that are made whole when it runs."""

    name: str  # of the module, as in named_modules(); "" is the root
    module: nn.Module
    parameters: list[tuple[list[str], nn.Parameter]] = field(default_factory=list)  # all names of each, first is saved


def choose_units(
    model: nn.Module, units: Iterable[UnitChoice] | None, operation: str = "fully_shard"
) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of every unit but the root, in named_modules() order.

    By default the blocks that find_blocks returns. `operation`: whose argument `units` is, for messages.
    """
    if units is None:
        return find_blocks(model)
    chosen: set[nn.Module] = set()
    for unit in units:
        if isinstance(unit, type):
            found = [module for module in model.modules() if isinstance(module, unit)]
            what = f"class {unit.__qualname__}"
        elif isinstance(unit, str):
            found = [module for name, module in model.named_modules() if name == unit]
            what = f"name {unit!r}"
        else:
            found = [module for module in model.modules() if module is unit]
            what = f"a {type(unit).__name__}"
        if not found:
            raise ValueError(
                f"[zeropg] {operation}: units contains {what}, which is no submodule of the {type(model).__name__}; "
                "expected submodules, their names as in named_modules(), or their classes."
            )
        chosen.update(found)
    return [(name, module) for name, module in model.named_modules() if module in chosen and module is not model]


# A part of a Sequential with fewer elements is not worth a unit of its own: gathering it costs more than it saves.
_LARGE_NUMEL = 1 << 20


# What these hold is called or used; nobody calls them, so nothing would make them whole.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of the parts that a model runs one after the other, in named_modules() order.

    These are the children of every `nn.ModuleList` (the blocks of a transformer); of `nn.Sequential` and
    `nn.ModuleDict` those that are made of layers and have a sibling of their class (the blocks of a ResNet); of
    `nn.Sequential` also those of a million elements and more. What lies inside one of them belongs to it.
    """
    return _blocks_in("", model, seen=set(), is_block=False)


def _blocks_in(name: str, module: nn.Module, seen: set[nn.Module], is_block: bool) -> list[tuple[str, nn.Module]]:
    """`is_block`: `module` is one itself unless there is an nn.ModuleList in it."""
    blocks: list[tuple[str, nn.Module]] = []
    made_of_layers = [type(child) for child in module.children() if next(child.children(), None) is not None]
    for key, child in module.named_children():
        if child in seen:
            continue
        seen.add(child)
        child_name = f"{name}.{key}" if name else key
        if isinstance(child, _CONTAINERS):
            blocks += _blocks_in(child_name, child, seen, is_block)
        elif isinstance(module, nn.ModuleList):
            blocks.append((child_name, child))
        elif is_block or not isinstance(module, nn.Sequential | nn.ModuleDict):
            blocks += _blocks_in(child_name, child, seen, is_block)
        else:
            is_repeated = made_of_layers.count(type(child)) > 1
            inside = _blocks_in(child_name, child, seen, is_repeated and not isinstance(child, nn.Sequential))
            is_large = isinstance(module, nn.Sequential) and _numel(child) >= _LARGE_NUMEL
            blocks += inside or ([(child_name, child)] if is_repeated or is_large else [])
    return blocks


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def plan_units(
    model: nn.Module, units: Iterable[UnitChoice] | None, ignored_params: Iterable[nn.Parameter] | None
) -> list[UnitPlan]:
    """Gives every parameter to the innermost unit around it, one that several units use to the root, which is last."""
    ignored = {id(parameter) for parameter in ignored_params or ()}
    chosen = choose_units(model, units)
    plans = [UnitPlan(name, module) for name, module in chosen]
    root = UnitPlan("", model)
    plan_of_prefix = {plan.name: plan for plan in plans}

    names: dict[int, list[str]] = {}
    homes: dict[int, list[UnitPlan]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in ignored:
            continue
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
        home = _innermost(name, plan_of_prefix) or root
        if all(home is not other for other in homes.setdefault(id(parameter), [])):
            homes[id(parameter)].append(home)
    for key, parameter in parameters.items():
        home = homes[key][0] if len(homes[key]) == 1 else root
        home.parameters.append((names[key], parameter))
    return [plan for plan in plans if plan.parameters] + [root]


def _innermost(parameter_name: str, plan_of_prefix: dict[str, UnitPlan]) -> UnitPlan | None:
    parts = parameter_name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        plan = plan_of_prefix.get(".".join(parts[:length]))
        if plan is not None:
            return plan
    return None


def renormalized_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters whose forwards write the rows that a rank looks up, and no others: Embedding(max_norm=)."""
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    }
