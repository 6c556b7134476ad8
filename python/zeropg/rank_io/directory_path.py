"""The directory that a user names."""

from __future__ import annotations

import os
from pathlib import Path


def directory_path(directory: str | os.PathLike[str]) -> Path:
    """Returns the absolute path, which goes through links as the given one does.

    Raises ValueError for '', which is rather an unset variable than this directory.
    """
    name = os.fsdecode(directory)
    if not name:
        raise ValueError("the directory is '', expected a path; '.' is the working directory")
    return Path.cwd() / name
