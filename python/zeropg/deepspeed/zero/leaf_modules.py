"""Modules that are made whole at once, with all that is in them: DeepSpeed's leaf modules, zeropg's units."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from zeropg.deepspeed.zero.owners import place_of
from zeropg.sharding.units import find_blocks

_MARK = "_zeropg_is_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks all modules of these classes, before `initialize`; returns them.

    Args:
        leaf_module_classes: classes, or their names, with or without the module that defines them.

    Raises ValueError where there is no such module and raise_if_not_found.
    """
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the marks of these classes away, before `initialize`; returns their modules."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names in named_modules(), before `initialize`, or takes their marks away.

    Returns (the modules, names of which there is none). Raises ValueError for the latter and raise_if_not_found.
    """
    return _set_named(model, module_names, flag, raise_if_not_found, lambda name, wanted: name == wanted)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As set_z3_leaf_modules_by_name, for all modules whose names end so."""
    return _set_named(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks one module, before `initialize`, or takes its mark away."""
    vars(model)[_MARK] = flag


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(vars(model).get(_MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter of an engine belongs to a marked module."""
    if (place := place_of(model)) is None:
        return False
    modules = dict(place.engine.module.named_modules())
    parts = place.name.split(".")[:-1]
    return any(z3_leaf_module(modules[".".join(parts[: count + 1])]) for count in range(len(parts)))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def mark_named(model: nn.Module, classes: Iterable[str], names: Iterable[str], suffixes: Iterable[str]) -> None:
    """Marks what the configuration's `leaf_module` names; what is not there is left out."""
    _set(model, classes, True, False)
    wanted, ends = set(names), tuple(suffixes)
    for name, module in model.named_modules():
        if name in wanted or (ends and name.endswith(ends)):
            set_z3_leaf_module(module, True)


def mark_cut(model: nn.Module, classes: Iterable[str]) -> None:
    """Marks modules of these classes that zeropg's own choice of units would cut: DeepSpeed's default, which has
    nothing to ask for inside of a block."""
    blocks = [name for name, _ in find_blocks(model)]
    for name, module in model.named_modules():
        if _is_of(module, (), set(classes)) and any(block.startswith(f"{name}.") for block in blocks):
            set_z3_leaf_module(module, True)


def units_around_leaves(model: nn.Module) -> list[str] | None:
    """Returns the names of the units: each leaf module, and zeropg's own choice around them; None without leaves.

    So a program may call a leaf module by itself, as in a method of the model beside its forward.

    Raises ValueError for a leaf module that is never called.
    """
    marked = {name: module for name, module in model.named_modules() if name and z3_leaf_module(module)}
    for name, module in marked.items():
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"[zeropg] initialize: the leaf module '{name}' is a {type(module).__name__}, which has no forward, so "
                "nothing would make its parameters whole; mark the module that contains it"
            )
    if not marked:
        return None
    inside = _inside(list(marked))
    blocks = [name for name, _ in find_blocks(model)]
    return [name for name in blocks if not inside(name) and name not in marked] + [
        name for name in marked if not inside(name)
    ]


def _inside(outer: list[str]) -> Callable[[str], bool]:
    """Whether a name is of a module inside one of those."""
    return lambda name: any(name.startswith(f"{leaf}.") for leaf in outer)


def _set_named(
    model: nn.Module, wanted: Iterable[str], flag: bool, raises: bool, fits: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    named = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    missing = []
    for one in wanted:
        fitting = {name: module for name, module in named.items() if fits(name, one)}
        missing += [] if fitting else [one]
        found |= fitting
    if missing and raises:
        raise ValueError(
            f"[zeropg] set_z3_leaf_modules: the {type(model).__name__} has no module {', '.join(map(repr, missing))}"
        )
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing


def _set(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    classes = list(classes)
    kinds = tuple(kind for kind in classes if isinstance(kind, type))
    names = {kind for kind in classes if isinstance(kind, str)}
    found = []
    for module in model.modules():
        if _is_of(module, kinds, names):
            set_z3_leaf_module(module, flag)
            found.append(module)
    if not found and raise_if_not_found:
        listed = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in classes)
        raise ValueError(
            f"[zeropg] set_z3_leaf_modules: the {type(model).__name__} has no module of {listed or 'no class at all'}"
        )
    return found


def _is_of(module: nn.Module, kinds: tuple[type[nn.Module], ...], names: set[str]) -> bool:
    kind = type(module)
    return isinstance(module, kinds) or bool(names & {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"})
