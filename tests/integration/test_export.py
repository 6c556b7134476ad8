"""save_16bit_weights on real ranks: what comes out loads elsewhere, and what fails leaves nothing half-written."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.spawn import run_ranks

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, load_model


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("scale", torch.rand(5) * 1e-3)
        self.register_buffer("scratch", torch.rand(7), persistent=False)


class Model(nn.Module):
    """Odd sizes, tied weights, frozen and integer parameters, an empty one, buffers of every kind."""

    def __init__(self, width: int = 13, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(101, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.bn = nn.BatchNorm1d(3)
        self.temperature = nn.Parameter(torch.rand(()))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.table = nn.Parameter(torch.arange(11), requires_grad=False)
        self.blocks[0].up.weight.requires_grad_(False)
        self.head = nn.Linear(width, 101, bias=False)
        self.head.weight = self.embed.weight


def local_shards(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int, int]]:
    """Flat ranges of uneven length that cut through tensors; parameters in model.ignored are in nobody's range."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = [(n, p) for n, p in model.named_parameters() if n not in getattr(model, "ignored", ())]
    total = sum(p.numel() for _, p in parameters)
    begin, end = (total * edge * edge // world_size**2 for edge in (rank, rank + 1))
    offset = 0
    for name, parameter in parameters:
        start, stop = (min(max(edge - offset, 0), parameter.numel()) for edge in (begin, end))
        if start < stop:
            yield name, parameter.detach().flatten()[start:stop], start, stop
        offset += parameter.numel()


def shard(model: nn.Module, shards=local_shards) -> nn.Module:
    """Gives the model what an export asks of a sharded one, with `shards` in place of our own."""
    from zeropg.export import save_16bit_weights
    from zeropg.sharding.state import ShardedState
    from zeropg.tensor_parallel.groups import TensorParallel

    class StandIn(ShardedState):
        def __init__(self) -> None:
            self.model = model
            self.core = SimpleNamespace(process_group=dist.group.WORLD, replica=0, flat_groups=[])
            self.parallel = TensorParallel(dist.group.WORLD)

        def settle_writes(self, operation: str) -> None: ...

    save_16bit_weights.local_shards = shards
    model._zeropg_state = StandIn()
    model._zeropg = model._zeropg_state.core
    return model


def save(model: nn.Module, directory: Path, **options) -> str | None:
    """Returns the error's text, if there is one."""
    from zeropg.export.save_16bit_weights import save_16bit_weights

    try:
        save_16bit_weights(model, directory, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def save_fresh(directory: Path, options: dict, seed: int = 0, ignored: tuple[str, ...] = ()) -> str | None:
    model = Model(seed=seed)
    model.ignored = ignored
    return save(shard(model), directory, **options)


def expected_tensors(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.to(dtype).state_dict().items() if name != "head.weight"}


def load(directory: Path) -> dict[str, torch.Tensor]:
    """Loads as transformers does: a single file before an index."""
    if (directory / "model.safetensors").exists():
        return load_file(directory / "model.safetensors")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(directory / name)
        assert all(index["weight_map"][tensor] == name for tensor in part)
        tensors |= part
    assert tensors.keys() == index["weight_map"].keys()
    return tensors


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def assert_failed_everywhere(errors: list[str | None], *words: str) -> None:
    assert all(errors), errors
    for rank, error in enumerate(errors):
        assert f"[zeropg rank {rank}/{len(errors)}] save_16bit_weights: " in error
        for word in words:
            assert word in error, (word, error)
    assert len({error.split("save_16bit_weights: ", 1)[1] for error in errors}) == 1, errors


@pytest.mark.parametrize("world_size", (1, 3, 2))
def test_the_files_hold_what_module_to_gives(rank_pool, tmp_path, world_size):
    for dtype in (torch.bfloat16, torch.float16):
        directory = tmp_path / "new" / str(dtype)
        assert rank_pool(world_size, "gloo").run(save_fresh, directory, {"dtype": dtype}) == [None] * world_size
        assert names(directory) == ["model.safetensors"]
        assert_same(load(directory), expected_tensors(Model(), dtype))
        assert stat.S_IMODE((directory / "model.safetensors").stat().st_mode) == 0o600
        plain = Model(seed=1).to(dtype)
        assert load_model(plain, directory / "model.safetensors") == (set(), [])
        assert_same(plain.state_dict(), Model().to(dtype).state_dict())
        with safe_open(directory / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    check_many_files(rank_pool(world_size, "gloo"), tmp_path / "many")


def check_many_files(pool, directory: Path) -> None:
    """With a small max_shard_size: the files and the index that huggingface_hub would make."""
    assert pool.run(save_fresh, directory, {"max_shard_size": "2KB"}) == [None] * pool.world_size
    found = names(directory)
    count = len(found) - 1
    shards = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert found == [*shards, "model.safetensors.index.json"]
    assert_same(load(directory), expected_tensors(Model()))
    split = pytest.importorskip("huggingface_hub").split_torch_state_dict_into_shards
    expected = split(expected_tensors(Model()), max_shard_size=2000)
    index = json.loads((directory / found[-1]).read_text())
    assert index["weight_map"] == expected.tensor_to_filename
    assert index["metadata"]["total_size"] == expected.metadata["total_size"]


def save_every_stage(directory: Path) -> list[str | None]:
    import zeropg

    return [
        save(zeropg.fully_shard(Model(), stage=stage, param_dtype=dtype), directory / f"{stage} {dtype}")
        for stage in (0, 1, 2, 3)
        for dtype in (None, torch.bfloat16)
    ]


def test_every_stage_exports_its_masters(tmp_path):
    zeropg = pytest.importorskip("zeropg")
    if not hasattr(zeropg, "fully_shard"):
        pytest.skip("this build has no sharded module")
    assert run_ranks(3, save_every_stage, tmp_path) == [[None] * 8] * 3
    for directory in tmp_path.iterdir():
        assert_same(load(directory), expected_tensors(Model()))


def test_ignored_parameters_come_from_rank_0(rank_pool, tmp_path):
    ignored = ("embed.weight", "bn.weight")
    assert rank_pool(2, "gloo").run(save_fresh, tmp_path, {}, 0, ignored) == [None, None]
    assert_same(load(tmp_path), expected_tensors(Model()))


def save_plain(directory: Path) -> str | None:
    return save(shard(nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))), directory)


def test_an_untied_model_loads_with_plain_load_state_dict(rank_pool, tmp_path):
    assert rank_pool(2, "gloo").run(save_plain, tmp_path) == [None, None]
    plain = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5)).bfloat16()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)


def save_large(directory: Path) -> str | None:
    torch.manual_seed(0)
    return save(shard(nn.Linear(1500, 3001).double()), directory)


def test_ranges_of_many_chunks(rank_pool, tmp_path):
    assert rank_pool(2, "gloo").run(save_large, tmp_path) == [None] * 2
    torch.manual_seed(0)
    assert_same(load(tmp_path), nn.Linear(1500, 3001).double().bfloat16().state_dict())


def test_exports_of_other_sizes_replace_each_other(rank_pool, tmp_path):
    pool = rank_pool(2, "gloo")
    (tmp_path / "tokenizer.json").write_text("{}")
    for seed, size in enumerate(("2KB", "3KB", "3KB", "5GB", "2KB", "1 TiB", 10**9)):
        assert pool.run(save_fresh, tmp_path, {"max_shard_size": size}, seed) == [None, None]
        assert_same(load(tmp_path), expected_tensors(Model(seed=seed)))
        expected = {"model.safetensors"}
        if (tmp_path / "model.safetensors.index.json").exists():
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            expected = {"model.safetensors.index.json", *index["weight_map"].values()}
        assert set(names(tmp_path)) == expected | {"tokenizer.json"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.float32}, "ValueError"),
        ({"dtype": "bfloat16"}, "TypeError"),
        ({"max_shard_size": 0}, "ValueError"),
        ({"max_shard_size": -5}, "ValueError"),
        ({"max_shard_size": "0GB"}, "ValueError"),
        ({"max_shard_size": "five"}, "ValueError"),
        ({"max_shard_size": "5 PB"}, "ValueError"),
        ({"max_shard_size": "-5GB"}, "ValueError"),
        ({"max_shard_size": 1.5}, "TypeError"),
        ({"max_shard_size": True}, "TypeError"),
        ({"max_shard_size": 10**30}, "ValueError"),
    ],
)
def test_wrong_arguments_are_refused(rank_pool, tmp_path, options, words):
    errors = rank_pool(2, "gloo").run(save_fresh, tmp_path / "new", options)
    assert_failed_everywhere(errors, words, "ranks 0, 1:", "expected", next(iter(options)))
    assert not (tmp_path / "new").exists()


def save_differing(directory: Path, what: str) -> str | None:
    model, options = Model(), {}
    if dist.get_rank() == 1:
        if what == "directory":
            directory = directory / "other"
        elif what == "dtype":
            options = {"dtype": torch.float16}
        elif what == "bad dtype":
            options = {"dtype": torch.int8}
        elif what == "tensors":
            model.more = nn.Parameter(torch.zeros(1))
    return save(shard(model), directory, **options)


@pytest.mark.parametrize("what", ["directory", "dtype", "tensors"])
def test_arguments_that_differ_between_ranks_are_named(rank_pool, tmp_path, what):
    errors = rank_pool(2, "gloo").run(save_differing, tmp_path / "new", what)
    assert_failed_everywhere(errors, "ValueError", what, "ranks that differ: 1")
    assert not (tmp_path / "new").exists()


def test_one_rank_with_a_wrong_argument_fails_all(rank_pool, tmp_path):
    errors = rank_pool(2, "gloo").run(save_differing, tmp_path, "bad dtype")
    assert_failed_everywhere(errors, "rank 1: dtype is torch.int8")


def test_a_plain_module_is_refused(tmp_path):
    from zeropg.export.save_16bit_weights import save_16bit_weights

    with pytest.raises(TypeError, match=r"expected a model sharded by zeropg.fully_shard, got Linear"):
        save_16bit_weights(nn.Linear(1, 1), tmp_path)


def save_with_dtensor(directory: Path) -> str | None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    return save(shard(model), directory)


def test_tensor_parallel_parameters_are_refused(rank_pool, tmp_path):
    errors = rank_pool(2, "gloo").run(save_with_dtensor, tmp_path)
    assert_failed_everywhere(errors, "NotImplementedError", "'weight' is a DTensor")


def save_with_complex_buffer(directory: Path) -> str | None:
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    return save(shard(model), directory)


def test_a_dtype_that_the_format_lacks_is_refused(rank_pool, tmp_path):
    errors = rank_pool(2, "gloo").run(save_with_complex_buffer, tmp_path)
    assert_failed_everywhere(errors, "ValueError", "'phase' is ComplexDouble, which the format cannot hold")


def shards_with_hole(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int, int]]:
    for name, flat, start, stop in local_shards(model):
        if name == "blocks.1.up.weight":
            start, flat = start + 1, flat[1:]
        yield name, flat, start, stop


def save_with_hole(directory: Path) -> str | None:
    return save(shard(Model(), shards_with_hole), directory)


def test_ranges_that_do_not_cover_a_tensor_are_an_error(rank_pool, tmp_path):
    errors = rank_pool(2, "gloo").run(save_with_hole, tmp_path / "new")
    assert_failed_everywhere(errors, "of the 520 elements of 'blocks.1.up.weight'")
    assert not (tmp_path / "new").exists()


# Failing files: whatever happens, the older export stays whole.


@pytest.fixture(params=["5GB", "2KB"], ids=["over one file", "over many files"])
def older(request, rank_pool, tmp_path) -> Iterator[Path]:
    """A directory with an export of seed 7; afterwards it must be the same."""
    directory = tmp_path / "export"
    assert rank_pool(2, "gloo").run(save_fresh, directory, {"max_shard_size": request.param}, 7) == [None, None]
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    yield directory
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert_same(load(directory), expected_tensors(Model(seed=7)))


def test_a_path_that_cannot_be_made(rank_pool, tmp_path):
    (tmp_path / "file").write_text("x")
    errors = rank_pool(2, "gloo").run(save_fresh, tmp_path / "file" / "export", {})
    assert_failed_everywhere(errors, "OSError", "rank 0:", "Not a directory", str(tmp_path / "file"))
    errors = rank_pool(2, "gloo").run(save_fresh, tmp_path / "file", {})
    assert_failed_everywhere(errors, "OSError", "rank 0:", "File exists", str(tmp_path / "file"))


def test_a_directory_where_a_file_should_go(rank_pool, tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    errors = rank_pool(2, "gloo").run(save_fresh, tmp_path, {})
    assert_failed_everywhere(errors, "rank 0:", "is a directory; remove or rename it")
    assert names(tmp_path) == ["model.safetensors"]


@contextmanager
def mounted(target: Path, *options: str) -> Iterator[None]:
    target.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(target)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not allowed here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def test_a_full_disk_shows_before_any_data(rank_pool, tmp_path):
    with mounted(tmp_path / "disk", "-o", "size=64k"):
        assert rank_pool(2, "gloo").run(save_fresh, tmp_path / "disk", {}) == [None, None]  # 20 KB
        errors = rank_pool(2, "gloo").run(save_large, tmp_path / "disk")  # 9 MB
        assert_failed_everywhere(
            errors, "OSError", "rank 0: could not reserve space", "No space left on device (errno 28)"
        )
        assert names(tmp_path / "disk") == ["model.safetensors"]
        assert_same(load(tmp_path / "disk"), expected_tensors(Model()))


def test_a_read_only_disk(rank_pool, tmp_path):
    with mounted(tmp_path / "disk", "-o", "ro"):
        errors = rank_pool(2, "gloo").run(save_fresh, tmp_path / "disk", {})
        assert_failed_everywhere(errors, "OSError", "rank 0: could not create", "Read-only file system (errno 30)")


def save_with_limit(directory: Path, limited_rank: int, options: dict) -> str | None:
    model = shard(Model())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == limited_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        return save(model, directory, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limited_rank", [0, 1])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "2KB"}], ids=["one file", "many files"])
def test_a_rank_that_cannot_write_fails_all(rank_pool, older, limited_rank, options):
    errors = rank_pool(2, "gloo").run(save_with_limit, older, limited_rank, options)
    words = (f"rank {limited_rank}: could not ", "at offset ", "File too large (errno 27)", str(older))
    assert_failed_everywhere(errors, "OSError", *words)


def failing_shards(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int, int]]:
    for index, shard_range in enumerate(local_shards(model)):
        if index == 2 and dist.get_rank() == 1:
            raise RuntimeError("the tier lost its disk")
        yield shard_range


def save_failing(directory: Path) -> str | None:
    return save(shard(Model(), failing_shards), directory)


def test_a_rank_that_cannot_read_its_masters_fails_all(rank_pool, older):
    errors = rank_pool(2, "gloo").run(save_failing, older)
    assert_failed_everywhere(errors, "RuntimeError", "rank 1: the tier lost its disk")


def save_dying(directory: Path, dying_rank: int, options: dict) -> str | None:
    def shards(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int, int]]:
        for index, shard_range in enumerate(local_shards(model)):
            if index == 2 and dist.get_rank() == dying_rank:
                os.kill(os.getpid(), signal.SIGKILL)
            yield shard_range

    return save(shard(Model(), shards), directory, **options)


@pytest.mark.parametrize("dying_rank", [0, 1])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "2KB"}], ids=["one file", "many files"])
def test_a_rank_that_dies_leaves_no_file(rank_pool, older, dying_rank, options):
    pool = rank_pool(2, "gloo")
    errors = pool.run(save_dying, older, dying_rank, options, expect_death=[dying_rank], timeout=30)
    assert "DistBackendError: [zeropg rank" in errors[1 - dying_rank]
    assert "one of them died" in errors[1 - dying_rank]


def test_leftovers_of_killed_exports_are_removed_by_the_next(rank_pool, tmp_path):
    old, young, locked = (tmp_path / f".zeropg-{name}-model.safetensors.tmp" for name in ("old", "young", "locked"))
    for path in (old, young, locked):
        path.write_text("x")
    for path in (old, locked):
        os.utime(path, (1, 1))
    with open(locked) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert rank_pool(2, "gloo").run(save_fresh, tmp_path, {}) == [None, None]
    assert names(tmp_path) == sorted([locked.name, young.name, "model.safetensors"])


# Ranks on another host: a mount namespace in which the directory is another one.


def save_elsewhere(directory: Path, elsewhere: list[int], shards) -> str | None:
    if dist.get_rank() in elsewhere:
        libc = ctypes.CDLL(None, use_errno=True)
        new_namespace, private, recursive = 0x20000, 1 << 18, 0x4000
        if (
            libc.unshare(new_namespace) != 0
            or libc.mount(b"none", b"/", None, private | recursive, None) != 0
            or libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, None) != 0
        ):
            return f"no namespace: {os.strerror(ctypes.get_errno())}"
    return save(shard(Model(), shards), directory)


def run_elsewhere(directory: Path, elsewhere: list[int], shards=local_shards) -> list[str | None]:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("making a mount namespace is not allowed here")
    return run_ranks(3, save_elsewhere, directory, elsewhere, shards, backend="gloo")


@pytest.mark.parametrize("elsewhere", [[1], [1, 2]])
def test_ranks_without_the_file_system_send_their_part(tmp_path, elsewhere):
    assert run_elsewhere(tmp_path, elsewhere) == [None] * 3
    assert names(tmp_path) == ["model.safetensors"]
    assert_same(load(tmp_path), expected_tensors(Model()))


def test_a_rank_that_fails_while_it_sends_fails_all(tmp_path):
    assert_failed_everywhere(run_elsewhere(tmp_path, [1], failing_shards), "rank 1: the tier lost its disk")
    assert names(tmp_path) == []


# Hugging Face


def llama(tie: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tie,
    )
    return LlamaForCausalLM(config)


def save_llama(directory: Path, tie: bool, options: dict) -> str | None:
    return save(shard(llama(tie)), directory, **options)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "8KB"}], ids=["one file", "many files"])
def test_transformers_loads_a_llama(rank_pool, tmp_path, tie, options):
    transformers = pytest.importorskip("transformers")
    assert rank_pool(2, "gloo").run(save_llama, tmp_path, tie, options) == [None, None]
    assert {"config.json", "generation_config.json"} <= set(names(tmp_path))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.bfloat16
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tie
    tokens = torch.arange(20).reshape(2, 10)
    expected = llama(tie).eval()
    for parameter in expected.parameters():  # not .to(): from_pretrained leaves the rotary frequencies in fp32
        parameter.data = parameter.data.to(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, expected(tokens).logits)


def test_a_bar_shows_on_a_terminal_only(monkeypatch, capsys):
    import zeropg.rank_io.progress

    monkeypatch.setattr(zeropg.rank_io.progress, "_DELAY", 0)
    for is_terminal, is_first in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        with zeropg.rank_io.progress.progress("save_16bit_weights", 10, is_shown=is_first) as advance:
            advance(10)
        assert ("save_16bit_weights" in capsys.readouterr().err) == (is_terminal and is_first)
