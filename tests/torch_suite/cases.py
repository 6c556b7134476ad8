"""torch's own suite for backends, torch.testing._internal.distributed.distributed_test, with zeropg as the backend.

Import only in a process of its own (`python -m tests.torch_suite`): the suite reads the environment when it is loaded,
and IMPERSONATE=gloo replaces gloo by zeropg in that process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("BACKEND", "zeropg")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # with fewer GPUs than ranks the suite skips everything
if "TEMP_DIR" not in os.environ:
    _folder = tempfile.TemporaryDirectory(prefix="zeropg-torch-suite-")  # until this process ends
    os.environ["TEMP_DIR"] = _folder.name

import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.common_distributed import DistTestCases

BACKEND = os.environ["BACKEND"]
IS_IMPERSONATING = os.environ.get("IMPERSONATE") == "1"


def _impersonate(name: str) -> None:
    """Makes `name` create zeropg's backend, so that tests run which torch keeps for that name."""
    from zeropg.backend import create_backend

    dist.Backend.register_backend(
        name,
        create_backend,
        extended_api=True,
        devices=["cpu", "cuda"],
        # Under gloo's own type torch would cast the backend to its own class.
        _backend_type=dist.ProcessGroup.BackendType.CUSTOM,
    )


if IS_IMPERSONATING:
    _impersonate(BACKEND)
elif BACKEND == "zeropg":
    import zeropg  # noqa: F401  (a build folder on PYTHONPATH has no entry points)
for feature in DistTestCases.backend_feature.values():
    feature.add(BACKEND)

from torch.testing._internal.distributed import distributed_test  # noqa: E402  (reads all of the above)

find_events = distributed_test.get_profiling_event


def find_own_events(name: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Operations appear in profiles under our titles, whatever the backend is called."""
    own = name.replace(f"{BACKEND}:", "zeropg:")
    events = find_events(own, *args, **kwargs)
    for event in events:
        event.name = event.name.replace(own, name)
    return list(events)


if BACKEND == "zeropg" or IS_IMPERSONATING:
    distributed_test.get_profiling_event = find_own_events
    distributed_test.PROFILING_SUPPORTED_BACKENDS.append(BACKEND)
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(BACKEND)

CONTEXT = torch.multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.torch_suite.cases"])


def run_rank(environment: dict[str, str], target: Callable[..., None], args: Any, kwargs: Any) -> None:
    os.environ.update(environment)  # a forked rank has the fork server's, of the first test
    distributed_test.INIT_METHOD = environment["INIT_METHOD"]
    target(*args, **kwargs)


class TestBackend(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """Every test of the suite, its ranks forked from a process that has loaded torch: 0.5 s a test instead of 3 s."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(self._forked_rank)

    @staticmethod
    def _forked_rank(target: Callable[..., None], name: str, args: Any, kwargs: Any) -> Any:
        return CONTEXT.Process(target=run_rank, name=name, args=(dict(os.environ), target, args, kwargs))
