"""The stub of the compiled core names what the core has, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import zeropg
from zeropg._native import _C

STUB = Path(zeropg.__file__).parent / "_C.pyi"


def test_the_stub_names_every_class_function_and_member() -> None:
    stub = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            members = [m for m in node.body if isinstance(m, ast.FunctionDef)]
            fields = [m.target.id for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)]
            stub[node.name] = {m.name for m in members if not m.name.startswith("__")} | set(fields)
        elif isinstance(node, ast.FunctionDef):
            stub[node.name] = set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            stub[node.target.id] = set()
    core = {
        name: {m for m in vars(value) if not m.startswith("__")} - {"_pybind11_conduit_v1_"}
        if isinstance(value, type)
        else set()
        for name, value in vars(_C).items()
        if not name.startswith("_")
    }
    assert stub == core
