"""Wrong arguments: one clear error at the call, and the group stays usable."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.spawn import RankPool

Op = dist.ReduceOp


@pytest.fixture(scope="module")
def run(rank_pool: Callable[..., RankPool]) -> Iterator[Callable[..., Any]]:
    yield rank_pool(2).run


def without_memory() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def all_reduce(tensor: torch.Tensor, op: Any = Op.SUM) -> None:
    dist.all_reduce(tensor, op=op)


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "bitwise on floats": (lambda: all_reduce(torch.ones(3), Op.BAND), TypeError, "cannot reduce Float with bit_and"),
    "average of bool": (lambda: all_reduce(torch.ones(3).bool(), Op.AVG), TypeError, "cannot reduce Bool with"),
    "float8": (lambda: all_reduce(torch.ones(3).to(torch.float8_e4m3fn)), TypeError, "cannot reduce Float8_e4m3fn"),
    "gathered size": (
        lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(2)),
        ValueError,
        "the output tensor has 5 elements, expected 4",
    ),
    "scattered size": (
        lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(5)),
        ValueError,
        "the input tensor has 5 elements, expected 6",
    ),
    "list of another size": (
        lambda: dist.all_gather([torch.ones(3), torch.ones(4)], torch.ones(3)),
        ValueError,
        "the output tensor has 4 elements, expected 3",
    ),
    "list that is too short": (
        lambda: dist.all_gather([torch.ones(3)], torch.ones(3)),
        ValueError,
        "the list of output tensors has 1 entries, expected one per rank: 2",
    ),
    "another dtype": (
        lambda: dist.all_gather_into_tensor(torch.ones(4).double(), torch.ones(2)),
        TypeError,
        "tensors have the dtypes Float and Double, expected the same one",
    ),
    "splits": (
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [1, 2]),
        ValueError,
        "the input split sizes add up to 3, expected dimension 0: 4",
    ),
    "uneven without splits": (
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
        ValueError,
        "has 3 rows, expected a multiple of world_size 2",
    ),
    "expanded output": (
        lambda: all_reduce(torch.ones(1).expand(3)),
        ValueError,
        "some of its elements are one in memory, as after expand",
    ),
    "expanded output of a receive": (
        lambda: dist.irecv(torch.ones(1).expand(3), 1 - dist.get_rank()),
        ValueError,
        "some of its elements are one in memory, as after expand",
    ),
    "one tensor as all outputs": (
        lambda: dist.all_gather([torch.ones(3)] * 2, torch.ones(3)),
        ValueError,
        "two output tensors share memory, as in [tensor] * 2",
    ),
    "one tensor with strides as all outputs": (
        lambda: dist.all_gather([torch.ones(3, 2).t()] * 2, torch.ones(2, 3)),
        ValueError,
        "two output tensors share memory, as in [tensor] * 2",
    ),
    "one tensor with gaps as all outputs": (
        lambda: dist.all_gather([torch.ones(3, 2)[:, 0]] * 2, torch.ones(3)),
        ValueError,
        "two output tensors share memory, as in [tensor] * 2",
    ),
    "freed storage": (lambda: all_reduce(without_memory()), ValueError, "needs 12 bytes, and its storage has 0"),
    "freed storage of a message": (
        lambda: dist.isend(without_memory(), 1 - dist.get_rank()),
        ValueError,
        "needs 12 bytes, and its storage has 0",
    ),
    "negative tag": (lambda: dist.send(torch.ones(1), 1 - dist.get_rank(), tag=-1), ValueError, "the tag is -1"),
}


def check_call(name: str) -> None:
    call, error, match = CALLS[name]
    with pytest.raises(error, match=re.escape(match)) as caught:
        call()
    assert str(caught.value).startswith(f"[zeropg rank {dist.get_rank()}/2] "), caught.value
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2, 2], "the group stays usable"


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_raises(run: Callable[..., Any], name: str) -> None:
    run(check_call, name)


def check_guarded() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    guarded = torch.arange(2.0) + 10 * rank
    expected = guarded.clone()
    torch._C._set_throw_on_mutable_data_ptr(guarded)
    gathered = torch.empty(2 * size)
    dist.all_gather_into_tensor(gathered, guarded)
    assert gathered.view(size, 2)[rank].tolist() == expected.tolist()
    scattered = torch.empty(1)
    dist.reduce_scatter_tensor(scattered, guarded)
    exchanged = torch.empty(2)
    dist.all_to_all_single(exchanged, guarded)
    peer = (rank + 1) % size
    received = torch.empty(2)
    works = [dist.isend(guarded, peer), dist.irecv(received, peer)]
    for work in works:
        assert work is not None
        work.wait()
    assert received.tolist() == gathered.view(size, 2)[peer].tolist()


def test_a_tensor_that_is_guarded_against_writes_can_be_an_input(run: Callable[..., Any]) -> None:
    run(check_guarded)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"chunk_bytes": 1}, TypeError, "has no option 'chunk_bytes'; it has timeout, algorithms, bank_bytes"),
        ({"bank_bytes": "much"}, TypeError, "bank_bytes cannot be 'much'"),
        ({"bank_bytes": 1000}, ValueError, "bank_bytes is 1000, expected a multiple of 4096"),
        ({"mailbox_bytes": 12288}, ValueError, "mailbox_bytes is 12288, expected a power of two"),
        ({"algorithms": {"all_reduce": "magic"}}, ValueError, "'magic', expected one of all_reduce_"),
        ({"algorithms": {"allreduce": "magic"}}, ValueError, "the operation 'allreduce', which does not exist"),
    ],
)
def test_a_wrong_option_raises_before_anybody_waits(options: dict[str, Any], error: type, match: str) -> None:
    from zeropg.backend import BackendOptions

    store = dist.HashStore()
    with pytest.raises(error, match=match):
        dist.init_process_group("zeropg", store=store, rank=0, world_size=2, pg_options=BackendOptions(**options))
    assert not dist.is_initialized()


def test_options_of_another_backend_are_refused() -> None:
    import zeropg  # noqa: F401

    with pytest.raises(TypeError, match=r"expected a zeropg.BackendOptions"):
        dist.init_process_group(
            "zeropg", store=dist.HashStore(), rank=0, world_size=1, pg_options=dist.ProcessGroupGloo._Options()
        )


def check_splits_that_wrap_around() -> None:
    most = 2**63 - 1
    splits = [most, most, 6]  # together 2**64 + 4
    for received, sent in (([2, 1, 1], splits), (splits, [2, 1, 1])):
        with pytest.raises(ValueError, match="split sizes add up to more than dimension 0: 4"):
            dist.all_to_all_single(torch.ones(4), torch.ones(4), received, sent)
    for call in (
        lambda: dist.all_gather_into_tensor(torch.ones(2**62 % 3), torch.ones(1).expand(2**62)),
        lambda: dist.reduce_scatter_tensor(torch.ones(1).expand(2**62), torch.ones(1)),
    ):
        with pytest.raises(ValueError, match=r"would need 3 times 4611686018427387904 elements"):
            call()


def test_split_sizes_that_wrap_around_are_refused(rank_pool: Callable[..., RankPool]) -> None:
    rank_pool(3).run(check_splits_that_wrap_around)


def check_options() -> None:
    import copy
    from datetime import timedelta

    from zeropg.backend import BackendOptions

    place = {"host_id": "here", "domain_id": "this socket"}
    options = BackendOptions(bank_bytes=8192, timeout=timedelta(seconds=7), secret="s", **place)
    twin = copy.deepcopy(options)
    assert (twin.bank_bytes, twin.secret, twin._timeout) == (8192, "s", timedelta(seconds=7))
    assert (twin.host_id, twin.domain_id) == ("here", "this socket")
    group = dist.new_group(backend="zeropg", pg_options=options)
    tensor = torch.ones(100_001)
    dist.all_reduce(tensor, group=group)
    assert (tensor == 2).all()
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options.bank_bytes == 8192 and backend.options.host_id == "here"
    assert backend.topology().domains == [[list(range(dist.get_world_size()))]]


def test_options_reach_the_group(run: Callable[..., Any]) -> None:
    run(check_options)
