"""What processes may use of this machine."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu import machine

MIB = 1 << 20
GIB = 1 << 30


def test_mapped_files_that_were_read_are_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path / "none")
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 * MIB))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=16 * 1024 * MIB))
    before = machine.available_memory()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        assert sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)) == 0
        assert 60 * MIB < before - machine.available_memory() < 68 * MIB


@pytest.fixture
def control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a container that may use 8 GiB and has 7, of which 5 are cached files, 2 of those mapped, on a machine with more."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB, total=96 * GIB))
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
    counts = {"anon": 2, "file": 5, "shmem": 0, "file_mapped": 2, "inactive_file": 3, "active_file": 2}
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{7 * GIB}\n")
    (tmp_path / "memory.stat").write_text("".join(f"{name} {count * GIB}\n" for name, count in counts.items()))
    return tmp_path


def test_files_that_a_container_has_read_are_not_used_memory(control_group: Path) -> None:
    assert machine.available_memory() == (8 - 7 + 3) * GIB
    assert machine.total_memory() == 8 * GIB


def test_tmpfs_and_mapped_files_are_used_memory(control_group: Path) -> None:
    counts = {"anon": 2, "file": 5, "shmem": 3, "file_mapped": 3, "inactive_file": 1, "active_file": 1}
    (control_group / "memory.stat").write_text("".join(f"{name} {count * GIB}\n" for name, count in counts.items()))
    assert machine.available_memory() == (8 - 7) * GIB


def test_a_container_without_a_limit_has_the_machines_memory(control_group: Path) -> None:
    (control_group / "memory.max").write_text("max\n")
    assert 63 * GIB < machine.available_memory() <= 64 * GIB
    assert machine.total_memory() == 96 * GIB


def test_a_full_container_has_none(control_group: Path) -> None:
    (control_group / "memory.current").write_text(f"{12 * GIB}\n")
    assert machine.available_memory() == 0
