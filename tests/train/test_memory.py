"""The table of memory, and what a process holds."""

from __future__ import annotations

import torch

from zeropg.tools.plan.formulas import paper_bytes
from zeropg.tools.train.memory import memory_table, resident_bytes


def test_table_sums_the_formulas_classes_and_shows_the_others_apart():
    measured = {"parameters": 2 << 20, "gradients": 2 << 20, "optimizer": 6 << 20, "gathered": 1 << 20}
    planned = {"parameters": 2 << 20, "gradients": 2 << 20, "optimizer": 5 << 20, "gathered": 3 << 20}
    formula = paper_bytes(3, 2, 1 << 20, torch.bfloat16)
    lines = memory_table(measured, planned, formula, 1 << 20, 300 << 20).splitlines()
    assert lines[4].split() == ["sum", "10.00", "MiB", "9.00", "MiB", "8.00", "MiB", "10.00"]
    assert lines[5].split() == ["gathered", "1.00", "MiB", "3.00", "MiB", "1.00"]
    assert lines[6].split() == ["whole", "process", "(PSS)", "300.00", "MiB"]


def test_resident_bytes_are_those_of_a_process_with_torch():
    assert 50 << 20 < resident_bytes() < 100 << 30
