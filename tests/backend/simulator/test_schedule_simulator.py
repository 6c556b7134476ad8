"""The core's simulator as Python sees it."""

from __future__ import annotations

import pytest

from zeropg._native import _C


def test_an_all_reduce_over_two_nodes_sends_the_lower_bound_over_each_link() -> None:
    result = _C.simulate("all_reduce", 4 << 20, [[0, 1], [2, 3]], network_bytes_per_us=100.0)
    assert result["algorithm"] == "all_reduce_hierarchical"
    assert result["is_simulated"]
    assert result["link_bytes"] == [[0, 4 << 20], [4 << 20, 0]]
    assert 1.0 <= result["time_us"] / ((4 << 20) / 100.0) < 1.2


def test_a_large_world_gets_a_time() -> None:
    nodes = [list(range(8 * node, 8 * node + 8)) for node in range(256)]
    assert _C.simulate("all_reduce", 64 << 20, nodes)["time_us"] > 2 * 255 / 256 * (64 << 20) / 1250


def test_mistakes_are_value_errors_that_say_what_to_give() -> None:
    with pytest.raises(ValueError, match="unknown operation 'allreduce', expected one of all_reduce"):
        _C.simulate("allreduce", 4, [[0]])
    with pytest.raises(ValueError, match="unknown collective algorithm 'ring'"):
        _C.simulate("all_reduce", 4, [[0, 1]], algorithm="ring")
    with pytest.raises(ValueError, match="outside the group or on two nodes"):
        _C.simulate("all_reduce", 4, [[0, 1], [1]])
    with pytest.raises(ValueError, match="not a whole number of elements"):
        _C.simulate("all_reduce", 5, [[0, 1]])
