"""The parts for other packages load when they are used, and say what to install where that is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

EXTRAS = {"accelerate": "accelerate", "transformers": "accelerate", "lightning": "lightning"}


def test_importing_zeropg_loads_none_of_them() -> None:
    # The last two, of torch, are what takes longest to import.
    names = ("accelerate", "lightning", "peft", "transformers", "torch.distributed.tensor", "torch._dynamo")
    program = f"import sys, zeropg; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("extra", "missing"), EXTRAS.items())
def test_a_missing_package_is_an_error_that_names_the_extra(extra: str, missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import zeropg; zeropg.{extra}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"ImportError: [zeropg] zeropg.{extra} needs" in result.stderr
    assert f"pip install 'zeropg[{extra}]'" in result.stderr
