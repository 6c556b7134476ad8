"""READMEs name files that exist, link to pages and headings that exist, and cite notes that a source file holds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_cpp import ROOT
from tests.test_layout import ROOM_FOLDERS

SOURCES = {".h", ".cpp", ".inc", ".cu", ".py", ".pyi", ".sh", ".md"}
# A path, or a name whose ending says that it is a file of ours. `<name>.h` and `model.safetensors` are neither.
PATH = re.compile(r"(?:\.\./)*[\w.{},*-]+(?:/[\w.{},*-]+)*/?")
BRACES = re.compile(r"\{([^{}]*)\}")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NOTE = re.compile(r"Note \[([^\]]+)\]")


def tree() -> dict[str, Path]:
    """All files and folders that READMEs may speak of, by their path from the root."""
    found = [path for top in ROOM_FOLDERS for path in (ROOT / top, *(ROOT / top).rglob("*"))]
    found += [path for path in ROOT.iterdir() if path.is_file()]
    return {path.relative_to(ROOT).as_posix(): path for path in found if "__pycache__" not in path.parts}


TREE = tree()
READMES = sorted(path for name, path in TREE.items() if path.name == "README.md")
# "backend/engine/work.h" is also called "engine/work.h", "work.h" and, without its ending, "backend/engine/work".
ENDINGS = {
    "/".join(name.split("/")[start:])
    for path in TREE
    for name in (path, path.rsplit(".", 1)[0])
    for start in range(path.count("/") + 1)
}


def prose(readme: Path) -> str:
    """The text without its code blocks, which name files of the reader's."""
    return re.sub(r"^ *```.*?^ *```", "", readme.read_text(), flags=re.DOTALL | re.MULTILINE)


def spelled_out(name: str) -> list[str]:
    """ "work.{h,cpp}" -> ["work.h", "work.cpp"]."""
    parts = BRACES.split(name)
    return [
        "".join(choice)
        for choice in itertools.product(*([part] if i % 2 == 0 else part.split(",") for i, part in enumerate(parts)))
    ]


def is_a_claim(name: str, readme: Path) -> bool:
    """Whether `name`, in backticks, says that a file or folder of the tree is called so."""
    if Path(name).suffix in SOURCES:
        return True
    first = name.split("/")[0]
    return "/" in name and (name.startswith("../") or any((place / first).exists() for place in (ROOT, readme.parent)))


def exists(name: str, readme: Path) -> bool:
    if name.startswith("../"):
        inside = (readme.parent / name).resolve().relative_to(ROOT).as_posix()
        return inside in TREE
    if "*" in name:
        return any(Path(path).match(name) for path in TREE)
    return name.rstrip("/") in ENDINGS


def claims(readme: Path) -> Iterator[str]:
    for span in re.findall(r"`([^`\n]+)`", prose(readme)):
        if PATH.fullmatch(span):
            yield from (name for name in spelled_out(span) if is_a_claim(name, readme))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name_of(readme: Path) -> str:
    return readme.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_files_that_a_readme_names_exist(readme: Path) -> None:
    assert [name for name in claims(readme) if not exists(name, readme)] == []


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_links_of_a_readme_lead_somewhere(readme: Path) -> None:
    wrong = []
    for target in LINK.findall(prose(readme)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            page = (readme.parent / path).resolve() if path else readme
            if not page.exists() or (anchor and anchor not in anchors(page)):
                wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_notes_that_a_readme_cites_are_in_the_sources(readme: Path) -> None:
    titles = {
        title
        for path in TREE.values()
        if path.suffix in SOURCES - {".md"}
        for title in re.findall(r"^\s*(?://|#) Note \[([^\]]+)\]\s*$", path.read_text(), re.MULTILINE)
    }
    assert [title for title in NOTE.findall(prose(readme)) if title not in titles] == []


def test_a_readme_with_a_file_that_is_gone_is_found(tmp_path: Path) -> None:
    readme = ROOT / "backend" / "README.md"
    for name in ("transport/remote_transport.h", "../schedule_simulator.h", "engine/gone", "reduce_{avx2,mmx}.cpp"):
        assert all(is_a_claim(one, readme) for one in spelled_out(name))
        assert not all(exists(one, readme) for one in spelled_out(name))
    for name in ("collectives/reduce/reduce_{avx2,avx512}.cpp", "engine/work.h", "../compression/", "engine/work"):
        assert all(exists(one, readme) for one in spelled_out(name))
