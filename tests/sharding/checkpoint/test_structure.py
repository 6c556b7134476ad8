"""Nested values without pickle: what comes back is what went in, and what cannot is named."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from zeropg._native import _C
from zeropg.checkpoint.structure import decode, encode, fetch_scalar, keep_scalar
from zeropg.checkpoint.structure_file import make_structure_file, read_structure_file

numpy = pytest.importorskip("numpy")
CHUNK = 4096


def through_a_file(path: Path, value: Any) -> Any:
    """Writes the value as a save does, reads it as a load does."""
    file = make_structure_file({"extra": value})
    writer = _C.FileWriter.create(str(path), file.size_bytes)
    writer.keep_checksums(CHUNK)
    staging = _C.StagingBuffer()
    for part in file.ranges(0):
        writer.write(part.offset, part.values, part.dtype, staging)
    checksums = _C.join_checksums(writer.checksums(), file.size_bytes, CHUNK)
    return read_structure_file(_C.FileReader(str(path), file.size_bytes, CHUNK, checksums), {"extra"})["extra"]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (torch.Tensor, numpy.ndarray)):
        tensor, other = torch.as_tensor(a), torch.as_tensor(b)
        is_same = tensor.dtype == other.dtype and tensor.shape == other.shape
        return type(a) is type(b) and is_same and torch.equal(tensor.nan_to_num(7), other.nan_to_num(7))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


VALUES = {
    "nothing": None,
    "plain": {"a": [1, 2.5, "x", None, True], "b": {"c": []}, "": {}},
    "big numbers": [2**200, -(2**70), 1e-320, 0.1, -0.0],
    "not finite": [math.inf, -math.inf, math.nan, {"x": math.nan}],
    "tuples": (1, (2, [3, (4,)]), ()),
    "other keys": {1: "a", (2.5): "b", None: "c", False: "d", "e": 0},
    "keys like tags": {"$tuple": [1], "$": {"$dict": 2}},
    "counter": Counter({30: 1, 80: 2}),
    "text": 'quotes " and \\ and \n and ü and \0 and \U0001f600',
    "tensors": {"t": torch.arange(6).view(2, 3), "u": [torch.tensor(3.5), torch.zeros(0, 4), torch.tensor([True])]},
    "dtypes": [torch.ones(3, dtype=d) for d in (torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float64)],
    "views": torch.arange(12.0).view(3, 4).t()[1:],
    "arrays": (numpy.arange(5, dtype=numpy.uint32), numpy.array(2.5), numpy.zeros((2, 0))),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_from_a_file(tmp_path: Path, name: str) -> None:
    assert same(through_a_file(tmp_path / "file", VALUES[name]), VALUES[name])


def test_random_states_come_back(tmp_path: Path) -> None:
    generator = numpy.random.default_rng(3)
    states = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "generator": generator.bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    expected = random.random(), numpy.random.rand(), generator.random(), torch.rand(()).item()
    loaded = through_a_file(tmp_path / "file", states)
    random.setstate(loaded["python"])
    numpy.random.set_state(loaded["numpy"])
    generator.bit_generator.state = loaded["generator"]
    torch.set_rng_state(loaded["torch"])
    assert expected == (random.random(), numpy.random.rand(), generator.random(), torch.rand(()).item())


def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    from torch.optim import lr_scheduler as s

    return [
        s.MultiStepLR(optimizer, [2, 4]),
        s.CosineAnnealingWarmRestarts(optimizer, 3),
        s.LambdaLR(optimizer, lambda step: 0.9**step),
        s.SequentialLR(optimizer, [s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.9)], [3]),
        s.OneCycleLR(optimizer, 0.1, total_steps=20),
        s.ReduceLROnPlateau(optimizer),
    ]


@pytest.mark.parametrize("index", range(6))
def test_schedulers_and_the_scaler_go_on(tmp_path: Path, index: int) -> None:
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9) for _ in range(2)]
    first, second = (schedulers(optimizer)[index] for optimizer in optimizers)
    arguments = (1.0,) if index == 5 else ()
    for _ in range(3):
        optimizers[0].step()
        first.step(*arguments)
    state = {"scheduler": first.state_dict(), "scaler": torch.amp.GradScaler("cpu").state_dict()}
    loaded = through_a_file(tmp_path / "file", state)
    assert loaded["scaler"] == state["scaler"]
    second.load_state_dict(loaded["scheduler"])
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for _ in range(4):
        for optimizer, scheduler in zip(optimizers, (first, second), strict=True):
            optimizer.step()
            scheduler.step(*arguments)
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


def test_ordered_dicts_and_numpy_scalars_come_back_plain(tmp_path: Path) -> None:
    value = OrderedDict(a=numpy.float64(0.1), b=numpy.int32(3), c=torch.Size([2]))
    assert same(through_a_file(tmp_path / "file", value), {"a": 0.1, "b": 3, "c": (2,)})


Point = namedtuple("Point", "x y")
Endless: list[Any] = []
Endless.append(Endless)
REFUSED = {
    "extra is a builtins.set": {1, 2},
    "extra['a'][1]['b'] is a builtins.bytes": {"a": [0, {"b": b"x"}]},
    "extra['model'] is a torch.nn.modules.linear.Linear": {"model": torch.nn.Linear(1, 1)},
    "extra['point'] is a ": {"point": Point(1, 2)},
    "extra['f'] is a builtins.function": {"f": lambda: 0},
    "extra has the key (1, 2) of type tuple": {(1, 2): 0},
    "extra['sparse'] is a Tensor with layout torch.sparse_coo": {"sparse": torch.eye(2).to_sparse()},
    "extra['meta'] is a tensor on device meta": {"meta": torch.empty(2, device="meta")},
    "extra['c'] is a tensor of torch.complex128": {"c": torch.zeros(1, dtype=torch.complex128)},
    "extra['o'] is an array of object": {"o": numpy.array([object()])},
    "is nested deeper than 100, or contains itself": Endless,
    "extra['z'] is a builtins.complex": {"z": 1j},
}


@pytest.mark.parametrize("words", REFUSED)
def test_anything_else_is_refused_by_its_path(words: str) -> None:
    with pytest.raises(TypeError) as raised:
        make_structure_file({"extra": REFUSED[words]})
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"$tuple": 3}',
        '{"$dict": [[1]]}',
        '{"$dict": [[[1], 2]]}',
        '{"$float": "one"}',
        '{"$pickle": "gASVAAAAAA=="}',
        '{"$array": "nowhere"}',
        '{"$tensor": ["float32"]}',
        '{"$tensor": ["load", 1]}',
    ],
)
def test_what_encode_never_makes_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(json.loads(text), fetch_scalar)


def test_numbers_with_a_dtype_need_no_file() -> None:
    for value in (torch.tensor(0.1), torch.tensor(math.inf), torch.tensor(7), torch.tensor(True)):
        assert same(decode(json.loads(json.dumps(encode(value, "x", keep_scalar))), fetch_scalar), value)
    with pytest.raises(TypeError, match=r"x is a tensor of shape \[2\], expected a number"):
        encode(torch.zeros(2), "x", keep_scalar)
