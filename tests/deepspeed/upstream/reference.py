"""Engines over any model, their whole gradients and weights, and the same by DDP over the same group."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Values = dict[str, torch.Tensor]
ROWS = 4  # of a rank's micro-batch


def engine_over(model: nn.Module, stage: int, lr: float = 0.1, **more: Any) -> Any:
    """An engine with plain SGD: what a step does to weights is its gradient. `more`: of the configuration."""
    from zeropg import deepspeed

    gas = more.pop("gas", 1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = torch.optim.SGD(trained, lr=lr)
    return deepspeed.initialize(model=model, optimizer=made, config=config | more)[0]


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """Different ones on each rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))


def gradients(engine: Any) -> Values:
    """Whole averaged gradients, between backward and step."""
    from zeropg.deepspeed.utils import safe_get_full_grad

    found = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters() if p.requires_grad}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def weights(engine: Any) -> Values:
    import zeropg

    return zeropg.full_state_dict(engine.module, rank0_only=False)


def ddp_gradients(model: nn.Module, backward: Callable[[nn.Module], Any], **options: Any) -> Values:
    """Those of a copy of `model` under DDP, after backward(copy under DDP)."""
    plain = copy.deepcopy(model)
    backward(DistributedDataParallel(plain, **options))
    return {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}


def assert_same(found: Values, expected: Values, relative: float = 1e-5) -> None:
    """relative: 0: to the bit."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        named = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        absolute = 1e-6 if relative else 0.0
        torch.testing.assert_close(found[name], value, rtol=relative, atol=absolute, msg=named)
