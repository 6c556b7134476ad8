"""Tests whose body runs on every rank of a pool that the whole session shares."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.spawn import RankPool

STAGES = (0, 1, 2, 3)
BACKENDS = ("zeropg", "gloo")


def on_ranks(
    world_size: int = 2, *, backend: str | Sequence[str] = "zeropg", timeout: float = 60
) -> Callable[..., Any]:
    """Makes a test of a function that every rank calls with the test's parameters; an assertion may fail on any.

    backend: of the world's group; several make one test each.
    """
    backends = [backend] if isinstance(backend, str) else list(backend)

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def test(rank_pool: Callable[..., RankPool], backend: str = backends[0], **parameters: Any) -> None:
            pool = rank_pool(world_size, backend)
            pool.run(_call, function.__module__, function.__name__, parameters, timeout=timeout)

        own = [inspect.Parameter("rank_pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        if len(backends) > 1:
            own.append(inspect.Parameter("backend", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        functools.update_wrapper(test, function)
        del test.__wrapped__  # type: ignore[attr-defined]  # pytest would look through it for fixtures
        test.__signature__ = inspect.Signature([*own, *inspect.signature(function).parameters.values()])  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        return test if len(backends) == 1 else pytest.mark.parametrize("backend", backends)(test)

    return decorate


def _call(module: str, name: str, parameters: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return getattr(importlib.import_module(module), name).on_rank(**parameters)


@contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *words: str) -> Iterator[None]:
    """As pytest.raises, for messages that must contain all of `words`."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if not re.search(re.escape(word), str(error))]
        assert not missing, f"the message lacks {missing}: {error}"
    else:
        raise AssertionError(f"nothing was raised; expected {kind} with {words}")


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def close(a: torch.Tensor, b: torch.Tensor, relative: float = 1e-12) -> bool:
    return bool((a.double() - b.double()).norm() <= relative * b.double().norm() + 1e-300)
