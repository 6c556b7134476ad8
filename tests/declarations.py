"""What the classes of a C++ header declare, counted without a compiler: for headers as clang-format leaves them."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Comments, literals (so that no brace in them counts) and directives of the preprocessor.
_NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|(?P<literal>"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'(?!\w))|^\s*#(?:[^\n\\]|\\\n|\\.)*',
    re.DOTALL | re.MULTILINE,
)
_LABEL = re.compile(r"^\s*(?:public|protected|private)\s*:(?!:)")
_CLASS = re.compile(
    r"^(?:template\s*<.*>\s*)?(?:class|struct|union)\s+(?:\[\[.*?\]\]\s*|alignas\([^)]*\)\s*)*(?P<name>\w+)?", re.DOTALL
)
_NAMESPACE = re.compile(r"^(?:inline\s+)?namespace\b|^extern\b")
_NO_MEMBER = re.compile(r"^(?:friend|static_assert|using\s+namespace)\b")
_GOES_ON = tuple(";,{)<>+-*/%|&?.=")  # behind the braces of an initializer, but not behind those of a body
_ANNOUNCEMENT = re.compile(r"^(?:class|struct|union)\s+\w+$")


def members(header: str) -> dict[str, int]:
    """Class -> how many members it declares: functions, data, types; those of a class in it are its own."""
    counts: dict[str, int] = {}
    _count(_NOISE.sub(lambda match: '""' if match["literal"] else " ", header), "", counts)
    return counts


def _count(text: str, prefix: str, counts: dict[str, int]) -> int:
    total = 0
    for declaration, body in _declarations(text):
        found = _CLASS.match(declaration) if body is not None else None
        if _NO_MEMBER.match(declaration) or (body is None and _ANNOUNCEMENT.match(declaration)):
            continue
        total += 1 if found or "(" in declaration else 1 + _commas(declaration)
        if body is not None and _NAMESPACE.match(declaration):
            _count(body, prefix, counts)
        elif body is not None and found:
            name = prefix + (found["name"] or "(unnamed)")
            counts[name] = counts.get(name, 0) + _count(body, f"{name}::", counts)
    return total


def _declarations(text: str) -> Iterator[tuple[str, str | None]]:
    """Each declaration that no braces enclose, without its first braces, and what stands in these."""
    start, depth, opened, closed = 0, 0, -1, -1
    for at, character in enumerate(text):
        if character in "({":
            if character == "{" and depth == 0 and opened < 0:
                opened = at
            depth += 1
        elif character in ")}":
            depth -= 1
            if character == "}" and depth == 0 and closed < 0:
                closed = at
        ends = character == ";" or (character == "}" and not text[at + 1 :].lstrip().startswith(_GOES_ON))
        if depth == 0 and ends:
            declaration = text[start:at] if opened < 0 else text[start:opened] + text[closed + 1 : at]
            while label := _LABEL.match(declaration):
                declaration = declaration[label.end() :]
            if declaration.strip():
                yield declaration.strip(), text[opened + 1 : closed] if opened >= 0 else None
            start, opened, closed = at + 1, -1, -1


def _commas(declaration: str) -> int:
    """Between the names of one declaration: int a, b;"""
    depth = commas = 0
    for character in declaration:
        depth += (character in "<[{") - (character in ">]}")
        commas += character == "," and depth == 0
    return commas
