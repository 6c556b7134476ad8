"""Python's classes of codecs, made of what the core registers."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel as DDP

import zeropg
from tests.sharding.ranks import on_ranks
from zeropg import compression
from zeropg.compression import BlockQuant, Codec, Fsdp2ReduceScatter, State, ddp_hook
from zeropg.compression.codec import CODECS, named_codecs


def test_a_class_is_what_the_registry_says() -> None:
    assert (
        str(inspect.signature(BlockQuant))
        == "(bits: int = 8, block: int = 256, entropy: bool = False, *, error_feedback: bool = True) -> None"
    )
    assert BlockQuant.__doc__ is not None and "bits: 8, which" in BlockQuant.__doc__
    assert issubclass(BlockQuant, Codec) and BlockQuant.__qualname__ == "BlockQuant"
    codec = BlockQuant(4, error_feedback=False)
    assert repr(codec) == "BlockQuant(error_feedback=False, bits=4, block=256, entropy=False)"
    assert str(codec) == "block_quant(bits=4, block=256)"
    assert str(BlockQuant()) == "block_quant(bits=8, block=256) with error feedback"
    assert codec == BlockQuant(bits=4, error_feedback=False) != BlockQuant(4)
    assert hash(codec) == hash(replace(BlockQuant(4), error_feedback=False))
    assert pickle.loads(pickle.dumps(codec)) == copy.deepcopy(codec) == codec
    with pytest.raises(FrozenInstanceError):
        codec.bits = 8  # type: ignore[misc]


def test_bad_parameters_are_refused_where_they_are_given() -> None:
    with pytest.raises(ValueError, match="expected 4 or 8"):
        BlockQuant(5)
    with pytest.raises(ValueError, match="a multiple of 32"):
        BlockQuant(block=100)
    with pytest.raises(ValueError, match="expected an integer"):
        BlockQuant(4.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bits is '4', expected a number"):
        BlockQuant("4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="error_feedback is 'no', expected True or False"):
        BlockQuant(4, error_feedback="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ratio"):
        BlockQuant(ratio=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="abstract"):
        Codec()  # type: ignore[abstract]


@pytest.mark.parametrize("name", CODECS)
@on_ranks(2)
def test_each_codec_serves_every_way_to_train(name: str) -> None:
    codec = CODECS[name]()
    assert getattr(compression, type(codec).__name__) is type(codec) and type(codec).__name__ in compression.__all__
    assert named_codecs()["int8" if name == "block_quant" else name] == codec
    if hasattr(codec, "ratio"):  # sends some of the values only
        codec = replace(codec, ratio=1.0)

    def gradient(model: torch.nn.Module) -> torch.Tensor:
        model(torch.ones(4, 64) * (dist.get_rank() + 1)).sum().backward()
        parameter = next(model.parameters())
        return parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad

    plain = Linear(64, 64)
    expected = gradient(DDP(plain))
    sharded = zeropg.fully_shard(copy.deepcopy(plain), stage=0, compression=codec)
    ddp = DDP(copy.deepcopy(plain))
    ddp.register_comm_hook(State(codec), ddp_hook)
    fsdp = fsdp2(copy.deepcopy(plain))
    fsdp.set_custom_reduce_scatter(Fsdp2ReduceScatter(codec))
    for model in (sharded, ddp, fsdp):
        model.zero_grad()
        torch.testing.assert_close(gradient(model), expected, rtol=0.02, atol=0)


def test_a_sum_beyond_fp32_is_found_and_not_buried() -> None:
    for codec in (CODECS["one_bit"](), CODECS["two_bit"](), CODECS["two_bit"](rotate=True)):
        compressor = codec.make_compressor()
        assert compressor.decode(compressor.encode(torch.full((1024,), 1e36)), 1024).isnan().all()
