"""Files that ranks write together: who opens what, and what becomes of it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from zeropg.rank_io.parallel_files import ByteRange, FileSpec, ParallelFiles


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_rank_opens_the_small_files_of_others_never(tmp_path: Path) -> None:
    shared = FileSpec(str(tmp_path / "shared"), 8, b"head")
    own = [FileSpec(str(tmp_path / f"rank-{rank}"), 4, b"", is_shared=False) for rank in range(100)]
    first, second = (ParallelFiles([shared, *own], chunk_bytes=1 << 20) for _ in range(2))
    before = descriptors()
    first.create()
    assert second.open()
    second.write(ByteRange(0, 4, torch.tensor([7], dtype=torch.int32), torch.int32))
    second.write(ByteRange(2, 0, torch.tensor([9], dtype=torch.int32), torch.int32))
    assert descriptors() <= before + 6  # two for each file that is written: through the page cache, and past it
    second.sync()
    pieces = second.checksums()
    assert len(pieces) == 101
    assert [index for index, of_file in enumerate(pieces) if of_file] == [0, 2]
    first.close()
    second.close()
    assert descriptors() == before
    assert (tmp_path / "shared").read_bytes() == b"head\x07\x00\x00\x00"
    assert (tmp_path / "rank-1").read_bytes() == b"\x09\x00\x00\x00"
    assert (tmp_path / "rank-99").stat().st_size == 4


def test_files_that_another_machine_made_are_not_seen(tmp_path: Path) -> None:
    assert not ParallelFiles([FileSpec(str(tmp_path / "nowhere"), 8, b"")]).open()
