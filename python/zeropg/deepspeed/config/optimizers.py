"""`optimizer_of` and `scheduler_of`: from the blocks `optimizer` and `scheduler` to classes and their arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from zeropg.deepspeed.config.error import ConfigError
from zeropg.deepspeed.config.model import Config
from zeropg.deepspeed.muon import Muon
from zeropg.deepspeed.ops.uncorrected_adam import UncorrectedAdam
from zeropg.deepspeed.schedules import SCHEDULES
from zeropg.optim import LAMB, Adam, AdamW, Lion, OneBitAdam, OneBitLamb, ZeroOneAdam

Params = dict[str, Any]


class Made(NamedTuple):
    """A class and its keyword arguments; calling it with what the class takes first makes an object."""

    type: type[Any]
    arguments: Params

    def __call__(self, first: Any) -> Any:
        return self.type(first, **self.arguments)


# What steps a flat range by itself; zeropg.shard_optimizer takes these.
_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_OURS = ("Lamb", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "ZeroOneAdam")
_OWN = "pass an optimizer of your own to initialize(optimizer=)"
_REFUSED = {
    "Adafactor": f"DeepSpeed makes none; {_OWN}, as zeropg.optim.Adafactor",
    "LBFGS": "it needs all gradients at once and several closure calls; use AdamW",
    "MuAdam": f"it is not torch's; {_OWN}",
    "MuAdamW": f"it is not torch's; {_OWN}",
    "MuSGD": f"it is not torch's; {_OWN}",
    "SparseAdam": "gradients of sharded models are dense; use Adam",
}
# Arguments of DeepSpeed's classes that zeropg's have no use for, and the values with which they may be there.
_FIXED: dict[str, tuple[Any, ...]] = {"bias_correction": (True,), "fp32_optimizer_states": (True,)}
_FIXED_ONE_BIT: dict[str, tuple[Any, ...]] = {
    "amsgrad": (False,),
    "bias_correction": (True, False),  # the warm-up of zeropg's corrects it, and the frozen variance is free of it
    "comm_backend_name": ("nccl", "mpi", "hccl", "compressed"),
    "cuda_aware": (True, False),
    "eps_inside_sqrt": (False, True),  # DeepSpeed's take it and do not use it
}
_FIXED_MUON: dict[str, tuple[Any, ...]] = {
    "ns_method": ("gram", "standard"),  # two ways to the same matrix
    "adam_w_mode": (True,),
    "fp32_optimizer_states": (True,),
    "per_head_muon": (False,),
    "torch_adam": (False, True),
}
_FREEZE_STEP = 100_000


def optimizer_of(config: Config) -> Made | None:
    """Returns the optimizer's class and its arguments, with DeepSpeed's defaults; None where none is configured.

    The result makes the optimizer of parameters or param groups: `optimizer_of(config)(model.parameters())`.

    Raises ConfigError for a class that cannot step shards, and for arguments that it does not take.
    """
    return _complete(find_optimizer(config), "optimizer.params")


def scheduler_of(config: Config) -> Made | None:
    """Returns the schedule's class and its arguments; None where none is configured.

    The result makes the schedule of an optimizer: `scheduler_of(config)(optimizer)`. Classes are those of
    `zeropg.deepspeed.schedules`, or of torch.optim.lr_scheduler.

    Raises ConfigError for a class that there is not, and for arguments that it does not take or lacks.
    """
    return _complete(find_scheduler(config), "scheduler.params")


def missing(made: Made | None) -> list[str]:
    """Returns the arguments that a class needs and does not have yet."""
    if made is None:
        return []
    _, *rest = inspect.signature(made.type).parameters.values()
    needed = [one.name for one in rest if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    return [name for name in needed if name not in made.arguments]


def wants_states_in_16_bits(config: Config) -> bool:
    return config.bf16.enabled and config.bf16.bf16_optimizer_states


def find_optimizer(config: Config) -> Made | None:
    """As `optimizer_of`, but arguments may be missing."""
    name = config.optimizer.type
    if name is None:
        if config.optimizer.params:
            raise ConfigError(['optimizer.type is missing; expected one, such as "AdamW", beside optimizer.params'])
        return None
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in config.optimizer.params.items()}
    if "max_grad_norm" in params:
        raise ConfigError(
            [f"optimizer.params.max_grad_norm is {params['max_grad_norm']!r}; expected gradient_clipping to say it"]
        )
    if make := _BY_NAME.get(name.lower()):
        made = make(params, config)
    elif name in _ELEMENTWISE:
        made = Made(getattr(torch.optim, name), params)
    else:
        raise ConfigError([_no_optimizer(name)])
    return _makes(_with_numbers(_known(made, "optimizer.params"), "optimizer.params"))


def find_scheduler(config: Config) -> Made | None:
    """As `scheduler_of`, but arguments may be missing."""
    name = config.scheduler.type
    if name is None:
        if config.scheduler.params:
            raise ConfigError(['scheduler.type is missing; expected one, such as "WarmupLR", beside scheduler.params'])
        return None
    found = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(found, type):
        raise ConfigError(
            [f"scheduler.type is {name!r}; expected one of {', '.join(SCHEDULES)}, or of torch.optim.lr_scheduler"]
        )
    return _with_numbers(_known(Made(found, dict(config.scheduler.params)), "scheduler.params"), "scheduler.params")


def _adam(params: Params, config: Config) -> Made:
    is_decoupled = str(config.optimizer.type).lower() == "adamw" or params.pop("adam_w_mode", True)
    params.pop("adam_w_mode", None)
    params.pop("set_grad_none", None)
    made_by: type[torch.optim.Optimizer] = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    is_torchs = params.pop("torch_adam", False)
    is_whole = is_torchs or params.pop("fp32_optimizer_states", not wants_states_in_16_bits(config))
    if is_whole and not is_torchs and params.get("bias_correction") is False:
        params.pop("bias_correction")
        _take_fixed(params, {"amsgrad": (False,)})
        return Made(UncorrectedAdam, {"adam_w_mode": is_decoupled} | params)
    _take_fixed(params, _FIXED)
    if not is_whole:
        _take_fixed(params, {"amsgrad": (False,)})
        made_by = AdamW if is_decoupled else Adam
        params["state_bits"] = 16
    # Where DeepSpeed's own Adam differs from torch's: AdamW of torch decays weights by 0.01 if nobody says otherwise.
    return Made(made_by, params if is_torchs else {"weight_decay": 0.0} | params)


def _adagrad(params: Params, config: Config) -> Made:
    _take_fixed(params, {"amsgrad": (False,), "fp32_optimizer_states": (True,)})
    return Made(torch.optim.Adagrad, params)


def _lamb(params: Params, config: Config) -> Made:
    corrects = params.get("bias_correction", True)
    _take_fixed(params, {"amsgrad": (False,), "bias_correction": (True, False)})
    own = {"bounds": _coefficients(params), "correction": "lr" if corrects else None}
    return Made(LAMB, {"eps": 1e-8, "weight_decay": 0.0} | own | params)


def _coefficients(params: Params) -> tuple[float, float]:
    return params.pop("min_coeff", 0.01), params.pop("max_coeff", 10.0)


def _muon(params: Params, config: Config) -> Made:
    _take_fixed(params, _FIXED_MUON)
    return Made(Muon, params)


def _lion(params: Params, config: Config) -> Made:
    _take_fixed(params, {"fp32_optimizer_states": (True,)})
    return Made(Lion, {"lr": 1e-3, "betas": (0.9, 0.999)} | params)


def _one_bit_adam(params: Params, config: Config) -> Made:
    return Made(OneBitAdam, _one_bit(params, config))


def _zero_one_adam(params: Params, config: Config) -> Made:
    for key in ("local_step_scaler", "local_step_clipper"):  # how many steps ranks may take apart: none here
        params.pop(key, None)
    own = {
        "warmup_steps": params.pop("var_update_scaler", 16),
        "variance_until": params.pop("var_freeze_step", _FREEZE_STEP),
    }
    return Made(ZeroOneAdam, own | _momenta_of_whole_gradients(params, config))


def _one_bit_lamb(params: Params, config: Config) -> Made:
    own = {
        "bounds": _coefficients(params),
        "coefficient_beta": params.pop("coeff_beta", 0.9),
        "factor_bounds": (params.pop("factor_min", 0.5), params.pop("factor_max", 4.0)),
        "factor_change": params.pop("factor_threshold", 0.1),
    }
    return Made(OneBitLamb, {"eps": 1e-8} | own | _one_bit(params, config))


def _one_bit(params: Params, config: Config) -> Params:
    warmup_steps = params.pop("freeze_step", _FREEZE_STEP)
    return {"warmup_steps": warmup_steps} | _momenta_of_whole_gradients(params, config)


def _momenta_of_whole_gradients(params: Params, config: Config) -> Params:
    if config.zero_optimization.stage > 1:
        raise ConfigError(
            [
                f"optimizer.type is {config.optimizer.type!r}, which averages momenta of whole gradients, in stage "
                f"{config.zero_optimization.stage}; expected stage 0 or 1, or AdamW"
            ]
        )
    _take_fixed(params, _FIXED_ONE_BIT)
    return {"weight_decay": 0.0, "clip": config.gradient_clipping or None} | params


_BY_NAME: Mapping[str, Callable[[Params, Config], Made]] = {
    "adam": _adam,
    "adamw": _adam,
    "adagrad": _adagrad,
    "lamb": _lamb,
    "lion": _lion,
    "muon": _muon,
    "onebitadam": _one_bit_adam,
    "onebitlamb": _one_bit_lamb,
    "zerooneadam": _zero_one_adam,
}


def _take_fixed(params: Params, fixed: Mapping[str, tuple[Any, ...]]) -> None:
    """Takes arguments out that have no counterpart. Raises ConfigError where a value would change a step."""
    for key, served in fixed.items():
        value = params.pop(key, served[0])
        if value not in served:
            raise ConfigError(
                [f"optimizer.params.{key} is {value!r}; expected {' or '.join(map(repr, served))}, or to leave it out"]
            )


def _no_optimizer(name: str) -> str:
    for refused, reason in _REFUSED.items():
        if refused.lower() == name.lower():
            return f"optimizer.type is {name!r}: {reason}"
    return f"optimizer.type is {name!r}{_near(name, [*_ELEMENTWISE, *_OURS])}"


def _known(made: Made, block: str) -> Made:
    _, *rest = inspect.signature(made.type).parameters
    unknown = [name for name in made.arguments if name not in rest]
    if unknown:
        raise ConfigError([f"{block}.{one} is unknown to {made.type.__name__}{_near(one, rest)}" for one in unknown])
    return made


def _with_numbers(made: Made, block: str) -> Made:
    """Raises ConfigError for a text where the class has a number, which comparisons deep inside would stumble over."""
    defaults = {name: one.default for name, one in inspect.signature(made.type).parameters.items()}
    for name, value in made.arguments.items():
        wants_number = name == "lr" or (
            isinstance(defaults[name], int | float) and not isinstance(defaults[name], bool)
        )
        if wants_number and isinstance(value, str) and value != "auto":
            raise ConfigError([f"{block}.{name} is {value!r}, a text; expected a number"])
        wanted = defaults[name]
        if isinstance(wanted, tuple) and value != "auto":
            is_right = isinstance(value, tuple) and len(value) == len(wanted)
            if not is_right or not all(isinstance(one, int | float) for one in value):
                given = list(value) if isinstance(value, tuple) else value
                raise ConfigError([f"{block}.{name} is {given!r}; expected {len(wanted)} numbers: {list(wanted)}"])
    return made


def _makes(made: Made) -> Made:
    """Raises ConfigError where the class refuses the values of its arguments."""
    if not missing(made) and "auto" not in made.arguments.values():
        try:
            made([torch.nn.Parameter(torch.zeros(2, 2))])
        except (ValueError, TypeError) as error:
            raise ConfigError([f"optimizer.params: {str(error).removeprefix('[zeropg] ')}"]) from error
    return made


def _complete(made: Made | None, block: str) -> Made | None:
    if names := missing(made):
        raise ConfigError([f"{block}.{name} is missing; its class needs it" for name in names])
    return made


def _near(name: str, known: Iterable[str]) -> str:
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[found[0]]!r}?" if found else f"; expected one of {', '.join(by_lower.values())}"
