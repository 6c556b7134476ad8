"""Which modules of a model are cut over ranks, and how: from the model's own plan, or from the configuration's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from zeropg.deepspeed.config.blocks.parallel import TensorParallel
from zeropg.deepspeed.tensor_parallel.adapters import (
    is_wrapped,
    name_around_adapters,
    name_without_adapters,
    with_adapters,
)


@dataclass(frozen=True)
class Style:
    """How torch cuts one module.

    make: torch's style; None: the module stays whole, and `sums_gradients` says what becomes of its gradients.
    dim: of the weight, along which it is cut. is_local: only this rank's part of the output, or of the input, is there.
    """

    make: Callable[[], ParallelStyle] | None
    dim: Literal[0, 1] | None = None
    is_local: bool = False
    sums_gradients: bool = False


_COLUMNS, _ROWS = "colwise", "rowwise"
# By the names that transformers' plans (base_model_tp_plan) have for them.
STYLES: Mapping[str, Style] = {
    _COLUMNS: Style(ColwiseParallel, 0, is_local=True),
    _ROWS: Style(RowwiseParallel, 1, is_local=True),
    "colwise_gather_output": Style(lambda: ColwiseParallel(output_layouts=Replicate()), 0),
    "colwise_rep": Style(lambda: ColwiseParallel(output_layouts=Replicate()), 0),
    "rowwise_split_input": Style(lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "rowwise_rep": Style(lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "embedding_rowwise": Style(lambda: RowwiseParallel(input_layouts=Replicate()), 0),
    "embedding_colwise": Style(lambda: ColwiseParallel(output_layouts=Replicate()), 1),
    "replicated_with_grad_allreduce": Style(None, sums_gradients=True),
    "replicate": Style(None),
}
_FIXED_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", "num_q_heads")
_QUERIES = ("q_proj", "query", "q", "wq", "q_lin", "to_q", "query_proj")
_OF_HEADS = (*_QUERIES, "k_proj", "v_proj", "qkv_proj", "query_key_value")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_FUSED = nn.modules.linear.NonDynamicallyQuantizableLinear  # whose weight nn.MultiheadAttention takes for itself
_CUT = (nn.Linear, nn.Embedding)  # by torch's styles, and subclasses with the same forward


def plan_of(model: nn.Module, config: TensorParallel) -> dict[str, str]:
    """Returns the name of a style in `STYLES` by the module's name. Nothing communicates.

    A module that no other computes in parts with stays whole where torch cannot cut it, as a scaled embedding.

    Raises ValueError where there is no plan, a pattern of the configuration matches no weight, or a module cannot be
    cut as planned.
    """
    plan = by_hand = dict(_of_configuration(model, config))
    if not config.partition_config.layer_specs or config.partition_config.use_default_specs:
        plan = {**dict(_of_model(model, besides=by_hand)), **plan}
    plan = {name: style for name, style in plan.items() if style != "skip"}
    if not any(STYLES[style].dim is not None for style in plan.values()):
        raise ValueError(
            f"tensor_parallel.autotp_size is {config.size}, and {type(model).__name__} has no plan of its own that "
            "says which layers to cut (a model of transformers has one where its configuration has "
            "base_model_tp_plan); say it in tensor_parallel.partition_config: "
            '{"layer_specs": [{"patterns": [".*\\\\.up\\\\.weight$"], "partition_type": "column"}, '
            '{"patterns": [".*\\\\.down\\\\.weight$"], "partition_type": "row"}]}'
        )
    if any(style == _COLUMNS and _last_of(name) in _OF_HEADS for name, style in plan.items()):
        _check_heads(model, config.size)
    _check_fixed_heads(model, by_hand, config.size)
    modules = dict(model.named_modules())
    plan = {name: style for name, style in plan.items() if _can_be_cut(name, modules[name], style, config.size)}
    _check_names(model, plan)
    return with_adapters(_without_odd_ties(model, plan), modules)


def tied_modules(model: nn.Module) -> list[list[str]]:
    """Returns the names of modules that share their weight, in sets of two or more."""
    by_weight: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            by_weight.setdefault(id(weight), []).append(name)
    return [names for names in by_weight.values() if len(names) > 1]


def _of_configuration(model: nn.Module, config: TensorParallel) -> Iterator[tuple[str, str]]:
    styles = {"row": _ROWS, "column": _COLUMNS, "skip": "skip"}
    of_embeddings = {"row": "embedding_rowwise", "column": "embedding_colwise", "skip": "skip"}
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if module._parameters.get("weight") is not None]
    seen: set[str] = set()
    for spec in config.partition_config.layer_specs:
        if spec.model_types is not None and model_type not in spec.model_types:
            continue
        for pattern in spec.patterns:
            found = [name for name in names if re.match(pattern, f"{name_without_adapters(name)}.weight")]
            if not found:
                raise ValueError(
                    f"tensor_parallel.partition_config has the pattern {pattern!r}, which no weight's name matches; "
                    f"there are {_some(f'{name}.weight' for name in names if isinstance(modules[name], nn.Linear))}"
                )
            for name in found:
                if name not in seen:
                    is_embedding = isinstance(modules[name], nn.Embedding)
                    yield name, (of_embeddings if is_embedding else styles)[spec.partition_type]
            seen.update(found)


def _of_model(model: nn.Module, besides: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """besides: what the configuration has decided."""
    own: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    names = dict(model.named_modules())
    for pattern, style in own.items():
        fits = re.compile(r"\d+".join(map(re.escape, pattern.split("*"))))
        for name in names:
            if not fits.fullmatch(name_without_adapters(name)) or is_wrapped(name, names) or name in besides:
                continue
            if style not in STYLES:
                raise ValueError(
                    f"the plan of {type(model).__name__} has {name!r} as {style!r}; expected one of "
                    f"{', '.join(STYLES)}. Say in tensor_parallel.partition_config which layers to cut"
                )
            yield name, style


def _check_heads(model: nn.Module, size: int) -> None:
    config = getattr(model, "config", None)
    for key in _HEADS:
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % size != 0:
            raise ValueError(
                f"tensor_parallel.autotp_size is {size}, and the model's {key} is {heads}; expected a divisor of it"
            )


def _check_fixed_heads(model: nn.Module, plan: dict[str, str], size: int) -> None:
    """A view by a fixed number of heads would make each narrower, and no error. Plans of transformers know better."""
    modules = dict(model.named_modules())
    for name, style in plan.items():
        parent, _, own = name_around_adapters(name).rpartition(".")
        attention = modules[parent]
        heads = {key: vars(attention)[key] for key in _FIXED_HEADS if isinstance(vars(attention).get(key), int)}
        if style != _COLUMNS or own not in _QUERIES or not heads:
            continue
        (key, count), features = next(iter(heads.items())), modules[name].weight.shape[0]
        width = vars(attention).get("head_dim")
        if not isinstance(width, int) or count * width * size != features:
            raise ValueError(
                f"{parent!r} has {key} {count}, and {name!r} is cut over {size} ranks, each of which has "
                f"{features // size} of its {features} outputs; where it views them by heads, set {key} to the rank's "
                f"own {count // size} and head_dim to {features // count} before, or say skip for its layers"
            )


def _can_be_cut(name: str, module: nn.Module, style: str, size: int) -> bool:
    """Whether torch cuts such a module. Raises ValueError where it does not, and its neighbours need its part."""
    dim, is_local = STYLES[style].dim, STYLES[style].is_local
    if dim is None:
        return True
    is_plain = isinstance(module, _CUT) and type(module).forward in {kind.forward for kind in _CUT}
    if not is_plain or isinstance(module, _FUSED) or not set(module._parameters) <= {"weight", "bias"}:
        if not is_local:
            return False
        raise ValueError(
            f"{name!r} is a {type(module).__name__}, which cannot be cut as {style}; expected a torch.nn.Linear. Say "
            "skip for it and its neighbours in tensor_parallel.partition_config"
        )
    shape = list(cast("nn.Parameter", module.weight).shape)
    if is_local and shape[dim] % size != 0:
        raise ValueError(
            f"the weight of {name!r} is {shape}, and is cut as {style} over {size} ranks; expected a multiple of "
            f"{size} instead of {shape[dim]}: choose another tensor_parallel.autotp_size, or say skip for it and its "
            "neighbours in partition_config"
        )
    return True


def _check_names(model: nn.Module, plan: dict[str, str]) -> None:
    """A parameter that another module has, too, would stay whole there. Weights of modules that share them are tied."""
    cut = {id(p): (name, p) for name, style in plan.items() if STYLES[style].dim is not None for p in _own(model, name)}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            owner = cut.get(id(parameter), (name, parameter))[0]
            if owner != name and not (key == "weight" and model.get_submodule(owner).weight is parameter):
                there = f"{name}.{key}".lstrip(".")
                raise ValueError(
                    f"a parameter of {owner!r} is {there!r}, too, and {owner!r} is to be cut over ranks; expected it "
                    "in one module alone: say skip for it in tensor_parallel.partition_config"
                )


def _own(model: nn.Module, name: str) -> list[nn.Parameter]:
    return list(model.get_submodule(name).parameters(recurse=False))


def _without_odd_ties(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Leaves a weight whole that two modules share and would not cut alike."""
    kept = dict(plan)
    for names in tied_modules(model):
        dims = {STYLES[plan[name]].dim if name in plan else None for name in names}
        if len(dims) == 1:
            continue
        if local := [name for name in names if name in plan and STYLES[plan[name]].is_local]:
            raise ValueError(
                f"{' and '.join(map(repr, names))} share their weight, and {local[0]!r} alone is cut as "
                f"{plan[local[0]]}; expected all of them cut alike, or none"
            )
        for name in names:
            kept.pop(name, None)
    return kept


def _last_of(name: str) -> str:
    return name_around_adapters(name).rpartition(".")[2]


def _some(names: Iterator[str]) -> str:
    every = list(names)
    return ", ".join(every[:6]) + (", ..." if len(every) > 6 else "")
