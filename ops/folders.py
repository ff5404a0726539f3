"""Where headrace keeps things between runs, by the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path

from ops.errors import SettingError


def data_folder(named: str = "") -> Path:
    """The data directory of a `serve`: the one named, or `headrace` under XDG_DATA_HOME or ~/.local/share. Raises SettingError."""
    if named:
        return _expanded(named)
    return _base("XDG_DATA_HOME", ".local/share", "--data-dir") / "headrace"


def cache_folder() -> Path:
    """Files that can be made again: HEADRACE_CACHE_DIR, or `headrace` under XDG_CACHE_HOME or ~/.cache. Raises SettingError."""
    if own := os.environ.get("HEADRACE_CACHE_DIR"):
        return _expanded(own)
    return _base("XDG_CACHE_HOME", ".cache", "HEADRACE_CACHE_DIR") / "headrace"


def _base(variable: str, below_home: str, instead: str) -> Path:
    if base := os.environ.get(variable):
        return _expanded(base)
    try:
        return Path.home() / below_home
    except RuntimeError:  # a user without an entry in the list of users, as in many containers
        raise SettingError(f"this user has no home directory: name a folder with {instead}, or set HOME") from None


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingError(f"{path}: that home directory is not known") from None
