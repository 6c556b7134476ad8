"""libFuzzer on what parses bytes of strangers and peers: half a minute in all, or ZEROPG_FUZZ_SECONDS (`make fuzz`).

The targets are built in a folder of their own, by Clang; without it tests/fuzz/replay_test.cpp still runs the corpus.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_cpp import BUILD, ROOT

FOLDER = Path(__file__).parent
TARGETS = sorted(path.stem.removesuffix("_fuzz") for path in FOLDER.glob("*_fuzz.cpp"))
SECONDS = int(os.environ.get("ZEROPG_FUZZ_SECONDS", "30"))
EMPTY = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n'


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the targets are."""
    clang, ninja = shutil.which("clang++") or shutil.which("clang++-14"), shutil.which("ninja")
    if clang is None or ninja is None:
        pytest.skip("needs Clang and ninja (Debian: clang)")
    source = tmp_path_factory.mktemp("libfuzzer") / "empty.cpp"
    source.write_text(EMPTY)
    trial = subprocess.run(
        [clang, "-fsanitize=fuzzer,address,undefined", source, "-o", source.with_suffix("")], capture_output=True
    )
    if trial.returncode != 0:
        pytest.skip("needs libFuzzer (Debian: libclang-rt-dev)")
    folder = BUILD.parent / f"fuzz-{BUILD.name}"
    settings = [f"-DCMAKE_CXX_COMPILER={clang}", f"-DPython3_EXECUTABLE={sys.executable}", "-DZEROPG_FUZZ=ON"]
    for command in (
        ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *settings],
        ["cmake", "--build", folder, "--target", *(f"{target}_fuzz" for target in TARGETS)],
    ):
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600)
        assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return folder / "tests" / "fuzz"


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_no_input_breaks_it(target: str, build: Path, tmp_path: Path) -> None:
    seconds = max(1, SECONDS // len(TARGETS))
    found = tmp_path / "found"
    found.mkdir()
    command = [
        build / f"{target}_fuzz",
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-timeout=20",
        "-print_final_stats=1",
        f"-artifact_prefix={tmp_path}/",
        found,
        FOLDER / "corpus" / target,
    ]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds + 120)
    print(result.stderr[-3000:])
    inputs = [f"{path.name}: {path.read_bytes().hex()}" for path in tmp_path.iterdir() if path.is_file()]
    assert result.returncode == 0, f"{result.stderr[-6000:]}\n" + "\n".join(inputs)
