"""What processes may use of this machine."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu import machine

MIB = 1 << 20


def test_mapped_files_that_were_read_are_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 * MIB))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=16 * 1024 * MIB))
    before = machine.available_memory()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        assert sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)) == 0
        assert 60 * MIB < before - machine.available_memory() < 68 * MIB
