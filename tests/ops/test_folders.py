"""Where things are kept, and what a user without a home directory is told."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from ops.errors import SettingError
from ops.folders import cache_folder, data_folder
from ops.prepare import place_weights
from ops.settings import resolve


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container runs whose user has only a number."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HEADRACE_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_folders_follow_the_xdg_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "headrace"
    assert data_folder() == tmp_path / ".local" / "share" / "headrace"
    assert data_folder("~/here") == tmp_path / "here"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert (cache_folder(), data_folder()) == (Path("/cache/headrace"), Path("/data/headrace"))
    monkeypatch.setenv("HEADRACE_CACHE_DIR", "~/own")
    assert cache_folder() == tmp_path / "own"


def test_without_a_home_the_folder_must_be_named(homeless: None) -> None:
    with pytest.raises(SettingError, match="no home directory: name a folder with --data-dir, or set HOME"):
        data_folder()
    with pytest.raises(SettingError, match="no home directory: name a folder with HEADRACE_CACHE_DIR, or set HOME"):
        cache_folder()
    with pytest.raises(SettingError, match="~/data: that home directory is not known"):
        data_folder("~/data")
    assert data_folder("/data") == Path("/data")


def test_without_a_home_weights_are_not_shared(homeless: None) -> None:
    resolved = resolve({}, {})
    place_weights(resolved)
    assert resolved.config.model.weights_cache_dir == "none"
