"""Packed weights in one process: their values, the layers that hold them, and what programs do to these."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import zeropg
from zeropg.quantization.packed_layer import PackedLayer, QuantizedLinear
from zeropg.quantization.packed_weight import describe, pack, unpack, unpack_with_torch

FORMATS = ("nf4", "int4", "int8")
# Appendix E of QLoRA's paper.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
LEVELS = {"nf4": NF4, "int4": torch.arange(-7.0, 8.0), "int8": torch.arange(-127.0, 128.0)}


def reference(weight: torch.Tensor, format: str, block: int) -> torch.Tensor:
    """What packing makes of a weight, in plain torch."""
    levels = LEVELS[format]
    blocks = nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % block)).view(-1, block)
    scale = (blocks.abs().amax(1, keepdim=True) / levels.max()).bfloat16().float()
    nearest = (blocks.unsqueeze(-1) / scale.unsqueeze(-1) - levels).abs().argmin(-1)
    return (levels[nearest] * scale).view(-1)[: weight.numel()].view_as(weight)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(64, 128), (3, 7), (33, 65), (1, 1), (0, 5)], ids=str)
def test_values_are_those_of_plain_torch(format: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * 0.02
    for block in (32, 64, 256):
        packed = pack(weight, format, block)
        bits = 8 if format == "int8" else 4
        blocks = math.ceil(weight.numel() / block)
        assert packed.dtype == torch.uint8 and packed.numel() <= 16 + 2 * blocks + math.ceil(weight.numel() * bits / 8)
        assert describe(packed) == (format, block, *shape)
        if weight.numel():
            torch.testing.assert_close(
                unpack(packed, torch.float32), reference(weight, format, block), rtol=1e-6, atol=0
            )
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            values = unpack(packed, dtype)
            assert values.dtype == dtype and torch.equal(values, unpack_with_torch(packed, dtype))
            assert torch.equal(values, unpack(packed, torch.float32).to(dtype))


@pytest.mark.parametrize(("format", "most"), [("nf4", 0.094), ("int4", 0.11), ("int8", 0.007)])
def test_normal_weights_lose_little(format: str, most: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    lost = (unpack(pack(weight, format, 64), torch.float32) - weight).norm() / weight.norm()
    assert most * 0.8 < lost < most


def layers(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """A packed layer, and a plain one with the same values."""
    torch.manual_seed(0)
    packed = nn.Linear(48, 20, bias=bias)
    packed.weight.requires_grad_(False)
    assert zeropg.quantize_frozen(packed) == [""]
    assert isinstance(packed, PackedLayer)
    plain = copy.deepcopy(packed)
    assert zeropg.dequantize_frozen(plain) == [""] and type(plain) is nn.Linear
    return packed, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_layer_computes_as_one_with_its_values(dtype: torch.dtype) -> None:
    packed, plain = layers()
    plain.to(dtype)
    kept: list[torch.Tensor] = []
    results = []
    for layer in (packed, plain):
        x = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            y = layer(x)
        (y.float() ** 2).sum().backward()
        assert x.grad is not None and layer.bias.grad is not None and y.dtype == dtype
        results.append((y, x.grad, layer.bias.grad.to(dtype)))
        if layer is packed:
            assert not any(t.is_floating_point() and t.numel() >= 48 * 20 for t in kept)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_a_layer_works_under_autocast_and_twice_differentiated() -> None:
    packed, plain = layers(bias=False)
    x = torch.randn(4, 48, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert packed(x).dtype == torch.bfloat16
        torch.testing.assert_close(packed(x), plain(x))
    twice = []
    for layer in (packed, plain):
        (first,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        twice.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*twice)


def test_what_is_packed_is_frozen_linear_and_not_shared() -> None:
    class Own(nn.Linear):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 64)
            self.attention = nn.MultiheadAttention(64, 4)
            self.a, self.b, self.trained, self.own = (
                nn.Linear(64, 64),
                nn.Linear(64, 32),
                nn.Linear(64, 64),
                Own(64, 64),
            )
            self.head, self.lm_head = nn.Linear(64, 32, bias=False), nn.Linear(64, 32)
            self.head.weight = self.embedding.weight
            self.inner = nn.ModuleDict({"gate": nn.Linear(64, 8), "up": nn.Linear(64, 8)})

    model = Model().requires_grad_(False)
    model.trained.requires_grad_(True)
    other = copy.deepcopy(model)
    assert zeropg.quantize_frozen(model) == ["a", "b", "inner.gate", "inner.up"]
    assert zeropg.quantize_frozen(other, exclude=("gate", "a")) == ["b", "lm_head", "inner.up"]
    assert [name for name, p in model.named_parameters() if p.dtype == torch.uint8] == [
        f"{name}.packed_weight" for name in ("a", "b", "inner.gate", "inner.up")
    ]
    assert isinstance(model.a, nn.Linear) and "64x64 packed in 2192 bytes" in repr(model.a)
    assert zeropg.dequantize_frozen(model, dtype=torch.bfloat16) == ["a", "b", "inner.gate", "inner.up"]
    assert model.a.weight.dtype == torch.bfloat16 and list(model.a._parameters) == ["weight", "bias"]


def test_what_cannot_be_is_refused() -> None:
    def frozen() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)

    def raises(words: str, model: Any, kind: type[Exception] = ValueError, **arguments: Any) -> None:
        before = None if not isinstance(model, nn.Module) else copy.deepcopy(model.state_dict())
        with pytest.raises(kind, match=words):
            zeropg.quantize_frozen(model, **arguments)
        if before is not None:
            assert before.keys() == model.state_dict().keys()

    raises("expected a torch.nn.Module", 3, TypeError)
    raises('expected "nf4"', frozen(), format="fp4")
    raises("multiple of 32", frozen(), block=48)
    raises("an integer", frozen(), TypeError, block=64.5)
    raises("several names", frozen(), TypeError, exclude="gate")
    raises("exclude has 'gate'", frozen(), exclude=("gate",))
    raises("requires_grad_", nn.Sequential(nn.Linear(64, 64)))
    with torch.device("meta"):
        raises("meta device", frozen())
    bad = frozen()
    bad[0].weight.data[3, 3] = math.nan  # type: ignore[index, union-attr, operator]
    raises("'0' holds NaN", bad)
    with pytest.raises(ValueError, match="nothing in this Sequential is packed"):
        zeropg.dequantize_frozen(frozen())
    with pytest.raises(TypeError, match="floating"):
        zeropg.dequantize_frozen(frozen(), dtype=torch.uint8)
    packed, _ = layers()
    with pytest.raises(TypeError, match=r"input is torch\.int64"):
        packed(torch.ones(2, 48, dtype=torch.int64))


def test_the_weight_of_a_packed_layer_tells_its_shape_and_no_more() -> None:
    packed, _ = layers()
    weight = packed.weight
    assert weight.shape == (20, 48) and weight.size(1) == 48 and weight.dtype == torch.float32 and weight.numel() == 960
    assert weight.device.type == "cpu" and not weight.requires_grad and weight.is_floating_point()
    for misuse in (
        lambda: weight + 1,
        lambda: weight.data.add_(1),
        lambda: weight.clone(),
        lambda: weight.T @ torch.ones(20),
        lambda: weight.sum(),
        lambda: nn.functional.linear(torch.ones(1, 48), packed.weight),
        lambda: torch.nn.init.normal_(packed.weight),
        lambda: weight.numpy(),
        lambda: weight.tolist(),
        lambda: weight[0],
    ):
        with pytest.raises(RuntimeError, match="dequantize_frozen"):
            misuse()
    with pytest.raises(RuntimeError, match="dequantize_frozen"):
        packed.weight.data += torch.ones(20, 48)
    with pytest.raises((KeyError, AttributeError)):
        packed.weight = nn.Parameter(torch.ones(20, 48))


def test_state_dicts_hold_the_bytes_and_tell_layers_apart() -> None:
    packed, plain = layers()
    other = nn.Linear(48, 20).requires_grad_(False)
    zeropg.quantize_frozen(other, format="int4")
    other.load_state_dict(packed.state_dict())  # bytes say what they are
    x = torch.randn(4, 48)
    assert torch.equal(other(x), packed(x))
    turned = nn.Linear(20, 48).requires_grad_(False)
    zeropg.quantize_frozen(turned)
    turned.packed_weight.data.copy_(packed.packed_weight.data)  # type: ignore[operator, union-attr]
    with pytest.raises(ValueError, match=r"of a weight \[20, 48\], expected \[48, 20\]"):
        turned(torch.randn(4, 20))
    with pytest.raises(RuntimeError, match="packed_weight"):
        packed.load_state_dict(plain.state_dict())
    packed.half().to(torch.bfloat16)
    assert packed.packed_weight.dtype == torch.uint8 and packed(x.bfloat16()).dtype == torch.bfloat16  # type: ignore[union-attr]
    assert isinstance(copy.deepcopy(packed), QuantizedLinear)
    packed.packed_weight.data.zero_()  # type: ignore[operator, union-attr]
    with pytest.raises(ValueError, match="no packed weight"):
        packed(x)


def test_gpt2s_layers_are_packed() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval().requires_grad_(False)
    names = zeropg.quantize_frozen(model)
    assert [name.rsplit(".", 1)[-1] for name in names] == ["c_attn", "c_proj", "c_fc", "c_proj"]
    tokens = torch.randint(0, 64, (2, 16))
    logits = model(tokens).logits
    assert zeropg.dequantize_frozen(model) == names
    torch.testing.assert_close(model(tokens).logits, logits)


def test_adapters_of_peft_stay_as_they_are() -> None:
    """Also those that are frozen: they were trained."""
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"]))
    lora.add_adapter("other", peft.LoraConfig(r=4, target_modules=["0"]))
    assert zeropg.quantize_frozen(lora) == ["base_model.model.0.base_layer", "base_model.model.1"]
    lora.set_adapter("other")
    lora(torch.randn(2, 64)).sum().backward()
    assert all(p.grad is not None for n, p in lora.named_parameters() if "lora_B.other" in n)


def test_odd_moments() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    assert zeropg.quantize_frozen(model, exclude=(name for name in ["1"])) == ["0"]
    with torch.inference_mode():
        zeropg.quantize_frozen(model)
    x = torch.randn(2, 64, requires_grad=True)
    model(x).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model[0](torch.randn(2, 64, dtype=torch.float64)).dtype == torch.float64
    huge = nn.Linear(64, 64).requires_grad_(False)
    huge.weight[0, 0] = 3.4e38
    with pytest.raises(ValueError, match="bfloat16 cannot hold"):
        zeropg.quantize_frozen(nn.Sequential(huge))


def test_packed_layers_are_pickled() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(nn.Linear(64, 64), utils.Conv1D(64, 64)).requires_grad_(False)
    zeropg.quantize_frozen(model)
    x = torch.randn(2, 64)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
