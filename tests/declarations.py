"""What the classes of a C++ file declare, counted without a compiler: for files as clang-format leaves them.

Where it is in doubt it counts too much, and a file that it cannot read is an error: a rule must not pass by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Comments, literals (so that no bracket in them counts) and directives of the preprocessor. Behind a digit an
# apostrophe separates thousands.
_NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|(?P<literal>\b(?:u8|[uUL])?R"(?P<end>[^()\\\s]*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+')|^\s*#(?:[^\n\\]|\\\n|\\.)*",
    re.DOTALL | re.MULTILINE,
)
# Their brackets are not those of a function.
_ATTRIBUTE = re.compile(r"\[\[.*?\]\]|\b(?:alignas|decltype|__attribute__)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_CLASS = re.compile(r"(?<!enum\s)\b(?:class|struct|union)\b")
_LABEL = re.compile(r"^\s*(?:public|protected|private)\s*:(?!:)")
_NO_MEMBER = re.compile(r"^(?:friend|static_assert|using\s+namespace)\b|^(?:class|struct|union)\s+\w+$")
_GOES_ON = re.compile(r"\s*[;,{)<>+\-*/%|&?.=]")  # behind the braces of an initializer, but not behind those of a body
_OPERATOR = re.compile(r"\boperator\s*(?:\(\)|[^\w\s(]+)|<<|<=>?|>=|->")  # whose angles enclose nothing
_BRACKETS = {")": "(", "]": "[", "}": "{"}


def members(code: str, file: str) -> dict[str, int]:
    """Class -> how many members it declares: functions, data, types; those of a class in it are its own.

    Of classes of one name in a file, such as specializations, the largest counts. `file`: for errors.
    """
    text = _NOISE.sub(lambda match: '""' if match["literal"] else " ", code)
    text = _ATTRIBUTE.sub(" ", text)
    _check_brackets(text, file)
    counts: dict[str, int] = {}
    _add_classes(text, "", file, counts)
    return counts


def _check_brackets(text: str, file: str) -> None:
    opened: list[str] = []
    for character in text:
        if character in "([{":
            opened.append(character)
        elif character in ")]}" and (not opened or opened.pop() != _BRACKETS[character]):
            raise ValueError(f"{file}: a {character} closes nothing")
    if opened:
        raise ValueError(f"{file}: a {opened[-1]} is not closed")


def _add_classes(text: str, prefix: str, file: str, counts: dict[str, int]) -> None:
    at = 0
    while found := _CLASS.search(text, at):
        at = found.end()
        opened = _body(text, at)
        if opened < 0:
            continue
        head = text[at:opened]
        while (shorter := re.sub(r"<[^<>]*>", "", head)) != head:
            head = shorter
        names = [name for name in re.findall(r"[\w:]+", re.split(r"(?<!:):(?!:)", head)[0]) if name != "final"]
        name = prefix + (names[-1] if names else "(unnamed)")
        at = _closing(text, opened)
        body = text[opened + 1 : at]
        counts[name] = max(counts.get(name, 0), sum(_names(each) for each in _declarations(body, f"{file}: {name}")))
        _add_classes(body, f"{name}::", file, counts)


def _body(text: str, start: int) -> int:
    """Where the braces open of the class whose `class` ends at `start`; -1: it is not defined there."""
    angles = nested = 0
    has_bases = False
    for at in range(start, len(text)):
        character = text[at]
        if angles > 0 and character in "([{":
            nested += 1
        elif angles > 0 and character in ")]}":
            nested -= 1
        elif nested == 0 and character in "<>":
            angles += 1 if character == "<" else -1
        elif angles == 0 and character == "{":
            return at
        elif angles == 0 and character == ":":
            has_bases = has_bases or ":" not in (text[at - 1], text[at + 1])
        if angles < 0 or (angles == 0 and (character in ";()=*&" or (character == "," and not has_bases))):
            return -1
    return -1


def _closing(text: str, opened: int) -> int:
    depth = 0
    for at in range(opened, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at
    raise AssertionError("brackets are checked")


def _declarations(text: str, where: str) -> Iterator[str]:
    """Each declaration that no braces enclose, with what stands in its own."""
    start = depth = 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and (character == ";" or (character == "}" and not _GOES_ON.match(text, at + 1))):
            yield from _unlabelled(text[start : at + (character == "}")])
            start = at + 1
    if left := list(_unlabelled(text[start:])):
        raise ValueError(f"{where}: no declaration ends with {left[0]!r}")


def _unlabelled(declaration: str) -> Iterator[str]:
    """Without what stands before it that declares nothing; nothing if that is all."""
    while label := _LABEL.match(declaration):
        declaration = declaration[label.end() :]
    declaration = declaration.strip()
    while template := re.match(r"template\s*<", declaration):
        declaration = declaration[_end_of_angles(declaration, template.end()) :].strip()
    if declaration:
        yield declaration


def _end_of_angles(text: str, start: int) -> int:
    angles, nested = 1, 0
    for at in range(start, len(text)):
        nested += (text[at] in "([{") - (text[at] in ")]}")
        if nested == 0:
            angles += (text[at] == "<") - (text[at] == ">")
        if angles == 0:
            return at + 1
    return start


def _names(declaration: str) -> int:
    """How many it declares: a class or a function is one, int a = f(1), b; are two."""
    if _NO_MEMBER.match(declaration):
        return 0
    if any(_body(declaration, found.end()) >= 0 for found in _CLASS.finditer(declaration)):
        return 1
    angles = nested = commas = commas_in_angles = 0
    is_data = False
    for character in _OPERATOR.sub(" ", declaration):
        if character == "(" and angles == nested == 0 and not is_data:
            return 1
        is_data = is_data or (angles == nested == 0 and character in "=[{")
        nested += (character in "([{") - (character in ")]}")
        if nested == 0 and character in "<>":
            angles = max(0, angles + (1 if character == "<" else -1))
        commas += character == "," and angles == nested == 0
        commas_in_angles += character == "," and angles > 0 and nested == 0
    return 1 + commas + (commas_in_angles if angles > 0 else 0)  # an angle left open is a comparison
