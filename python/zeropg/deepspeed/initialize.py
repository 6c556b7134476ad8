"""`initialize`: from a model, an optimizer and DeepSpeed's configuration to an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from zeropg.deepspeed.config import Config, optimizer_of, read, scheduler_of
from zeropg.deepspeed.config.source import load
from zeropg.deepspeed.dataloader import DeepSpeedDataLoader
from zeropg.deepspeed.distributed import init_distributed
from zeropg.deepspeed.engine import DeepSpeedEngine
from zeropg.deepspeed.engine_optimizer import EngineOptimizer
from zeropg.deepspeed.make_optimizer import check_state_bits, make_optimizer
from zeropg.deepspeed.shard import local_rank, shard_as_configured
from zeropg.deepspeed.tensor_parallel.following import Replaced, follow, following
from zeropg.deepspeed.tensor_parallel.prepare import is_cut, share_layers
from zeropg.deepspeed.tensor_parallel.ranks import DATA
from zeropg.deepspeed.zero.owners import register
from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.rank_io.agreement import check_same, together
from zeropg.sharding.generation import let_generate
from zeropg.sharding.sharded_class import FullyShardedModule

LOGGER = logging.getLogger("zeropg")

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
OptimizerLike = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike[str] | dict[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, DeepSpeedDataLoader | None, Any]:
    """Makes an engine that trains `model` as DeepSpeed's configuration says. All ranks must call.

    The arguments, their order and what comes back are DeepSpeed's.

    Args:
        args: an object whose `deepspeed_config` may name the configuration; its `local_rank` is set.
        model: sharded in place by `zeropg.fully_shard`; all ranks get the values of rank 0. With
            tensor_parallel.autotp_size layers are cut over ranks first; their parameters are new objects.
        optimizer: a torch optimizer over the model's parameters, or a function that makes one from a list of
            parameters. It takes precedence over the configuration's, and follows parameters that are cut.
        model_parameters: parameters or param groups for the configuration's optimizer or that function; default: all.
        training_data: a dataset, of which a loader is made.
        lr_scheduler: a scheduler of `optimizer`, or a function that makes one from an optimizer. It takes precedence
            over the configuration's.
        distributed_port, dist_init_required: for `init_distributed`, where there is no process group yet.
        mpu: an object with get_data_parallel_group() and the like; its model-parallel world must be 1.
        collate_fn: for the loader.
        config: DeepSpeed's configuration: a path of a JSON file, or a dictionary. `config_params` is its old name.
        mesh_param: must be None: sequences are not split over ranks.

    Returns:
        (engine, optimizer, loader, scheduler); what there is none of is None.

    Raises:
        ValueError: the configuration is missing, given twice or cannot be used (ConfigError), or the model has an
            engine already.
        TypeError: an argument is of the wrong kind.
        NotImplementedError: what is asked for is not available; the message says what to use instead.
    """
    _check(model, optimizer, lr_scheduler, mesh_param)
    assert model is not None  # as _check says
    raw = _own_mistake(lambda: load(_the_config(args, config, config_params)))
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if hasattr(args, "local_rank"):
        _warn_of_no_local_rank(args.local_rank)
        args.local_rank = local_rank()
    group = _data_parallel_group(mpu)
    settings = _read_together(group, raw)
    mesh = None
    if settings.tensor_parallel.size > 1 or is_cut(model):
        given = None if model_parameters is None else list(model_parameters)  # a generator would see those of later
        mesh, replaced = _share_layers(model, settings, mpu, optimizer)
        group = mesh.get_group(DATA)
        if isinstance(optimizer, torch.optim.Optimizer):
            follow(optimizer, replaced)
        model_parameters = None if given is None else following(given, replaced)
    device = shard_as_configured(model, settings, group)
    let_generate(model)
    sharded = _make_optimizer(model, optimizer, model_parameters, settings)
    scheduler = _make_scheduler(lr_scheduler, sharded, settings)
    engine = DeepSpeedEngine(
        model,
        settings,
        raw_config=raw,  # type: ignore[arg-type]  # it could be read
        optimizer=sharded,
        lr_scheduler=scheduler,
        collate_fn=collate_fn,
        device=device,
        mesh=mesh,
    )
    engine.mpu = mpu
    register(engine)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, sharded, engine.training_dataloader, scheduler


def _check(model: Any, optimizer: Any, lr_scheduler: Any, mesh_param: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"[zeropg] initialize: model is a {type(model).__name__}, expected a torch.nn.Module")
    if isinstance(model, DeepSpeedEngine):
        raise ValueError(
            "[zeropg] initialize: model is an engine already, which trains as it is; build another model for another"
        )
    if isinstance(model, FullyShardedModule):
        raise ValueError(
            f"[zeropg] initialize: this {type(model).__name__} is sharded already, by another engine or by "
            "zeropg.fully_shard; one model has one engine: build a second model for a second one"
        )
    if isinstance(optimizer, ShardedOptimizer) or not (
        optimizer is None or isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)
    ):
        raise TypeError(
            f"[zeropg] initialize: optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer that is "
            "not sharded, or a function that makes one"
        )
    is_scheduler = isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    if is_scheduler and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            "[zeropg] initialize: lr_scheduler is made for an optimizer that is not passed; pass that as optimizer=, "
            "or a function of an optimizer as lr_scheduler="
        )
    if mesh_param is not None:
        raise NotImplementedError(
            "[zeropg] initialize: mesh_param splits sequences over ranks, which is not available; leave it out"
        )


def _the_config(args: Any, config: Any, config_params: Any) -> Any:
    from_args = getattr(args, "deepspeed_config", None)
    given = {"config": config, "config_params": config_params, "args.deepspeed_config": from_args}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise ValueError(
            f"[zeropg] initialize: got {' and '.join(given) or 'no configuration'}; expected one of config=, and "
            "args.deepspeed_config (--deepspeed_config)"
        )
    return next(iter(given.values()))


def _warn_of_no_local_rank(given: Any) -> None:
    """Where a script may have taken itself for the only process before it came here."""
    if given == -1 and dist.get_world_size() > 1 and dist.get_rank() == 0:
        LOGGER.warning(
            "[zeropg] initialize: args.local_rank was -1, and there are %d ranks; it is set now, but what the script "
            "has done with it before was meant for one process. Start the script with python -m zeropg run "
            "--local_rank, which passes that argument, or let its default be int(os.environ.get('LOCAL_RANK', -1))",
            dist.get_world_size(),
        )


def _data_parallel_group(mpu: Any) -> dist.ProcessGroup:
    if mpu is None:
        return dist.distributed_c10d._get_default_group()
    if mpu.get_model_parallel_world_size() != 1:
        raise NotImplementedError(
            f"[zeropg] initialize: mpu has {mpu.get_model_parallel_world_size()} model-parallel ranks, expected 1: "
            "leave mpu out, and set tensor_parallel.autotp_size in the configuration, which cuts layers over ranks"
        )
    return mpu.get_data_parallel_group()  # type: ignore[no-any-return]


def _share_layers(
    model: nn.Module, settings: Config, mpu: Any, optimizer: OptimizerLike | None
) -> tuple[DeviceMesh, Replaced]:
    if mpu is not None:
        raise NotImplementedError(
            "[zeropg] initialize: got mpu and layers that are cut over ranks (tensor_parallel); leave mpu out: groups "
            "are made of neighbouring ranks"
        )
    if settings.tensor_parallel.size == 1:
        raise ValueError(
            "[zeropg] initialize: the model has DTensors, which are cut over ranks; set tensor_parallel.autotp_size in "
            "the configuration to how many ranks share them"
        )
    return share_layers(model, settings.tensor_parallel, "initialize", optimizer)


def _own_mistake(load_it: Callable[[], dict[str, Any]]) -> dict[str, Any] | ValueError:
    """The configuration; or what is wrong with it, to be told to ranks that may be waiting already."""
    try:
        return load_it()
    except ValueError as error:
        if not dist.is_initialized():
            raise
        return error


def _read_together(group: dist.ProcessGroup, raw: dict[str, Any] | ValueError) -> Config:
    """Raises ValueError, on every rank, where one has a configuration that cannot be used, or other ones than others:
    ranks would wait for each other, or part silently."""
    settings: list[Config] = []
    mistakes: list[ValueError] = []

    def announce() -> dict[str, str]:
        try:
            if isinstance(raw, ValueError):
                raise raw
            settings.append(read(raw, world_size=group.size()))
        except ValueError as error:
            mistakes.append(error)
            raise
        places = {"zero_optimization": {"offload_optimizer", "offload_param"}}  # each rank's own
        return dict(_leaves(settings[0].model_dump(mode="json", exclude=places)))

    try:
        seen = together(group, "initialize", announce)
    except ValueError:
        if mistakes:
            raise mistakes[0] from None  # with its lines as they are
        raise
    keys = sorted({key for entry in seen for key in entry})
    check_same(group, "initialize", [{key: entry.get(key, "left out") for key in keys} for entry in seen])
    return settings[0]


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", str(value)


def _make_optimizer(
    model: nn.Module, given: OptimizerLike | None, model_parameters: Parameters | None, config: Config
) -> torch.optim.Optimizer | None:
    make = given if given is not None else optimizer_of(config)
    if make is None:
        return None
    if isinstance(make, torch.optim.Optimizer):
        plain = make
    else:
        plain = make_optimizer(make, model, model.parameters() if model_parameters is None else model_parameters)
    check_state_bits(plain, config, "initialize")
    return EngineOptimizer(plain, model)


def _make_scheduler(given: Any, optimizer: torch.optim.Optimizer | None, config: Config) -> Any:
    make = given if given is not None else scheduler_of(config)
    if make is None or (hasattr(make, "step") and not isinstance(make, type)):
        return make
    if optimizer is None:
        raise ValueError("[zeropg] initialize: there is a scheduler but no optimizer; give one to initialize, too")
    return make(optimizer)
