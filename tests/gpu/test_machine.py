"""What processes may use of this machine."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu import control_group, machine

MIB = 1 << 20
GIB = 1 << 30


def test_mapped_files_that_were_read_are_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_group, "MOUNT", tmp_path / "none")
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 * MIB))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=16 * 1024 * MIB))
    before = machine.available_memory()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        assert sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)) == 0
        assert 60 * MIB < before - machine.available_memory() < 68 * MIB


class Groups:
    """The control groups that a process sees, as files below `root`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mount, self.process = root / "cgroup", root / "self"
        self.mount.mkdir()
        self.process.mkdir()
        monkeypatch.setattr(control_group, "MOUNT", self.mount)
        monkeypatch.setattr(control_group, "PROCESS", self.process)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB, total=96 * GIB))

    def enter(self, *lines: str) -> None:
        (self.process / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def write(self, path: str, content: object) -> None:
        file = self.mount / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")

    def write_counts(self, path: str, **gib: int) -> None:
        self.write(path, "\n".join(f"{name} {count * GIB}" for name, count in gib.items()))


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(tmp_path, monkeypatch)


@pytest.mark.parametrize(("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("299999 100000", 2), ("max 100000", 8)])
def test_a_container_has_the_cores_of_its_quota(groups: Groups, quota: str, cores: int) -> None:
    groups.enter("0::/")
    groups.write("cpu.max", quota)
    assert machine.available_cores() == cores


@pytest.mark.parametrize("hierarchy", ["0::/system.slice/headrace.service", "0::/system.slice"])
def test_the_tightest_of_nested_groups_counts(groups: Groups, hierarchy: str) -> None:
    groups.enter(hierarchy)
    groups.write("system.slice/cpu.max", "300000 100000")
    groups.write("system.slice/headrace.service/cpu.max", "max 100000")
    groups.write("system.slice/memory.max", 8 * GIB)
    groups.write("system.slice/headrace.service/memory.max", "max")
    assert machine.available_cores() == 3
    assert machine.total_memory() == 8 * GIB


@pytest.mark.parametrize(("quota", "cores"), [(100000, 1), (250000, 2), (-1, 8)])
@pytest.mark.parametrize("path", ["/", "/docker/1f3a", "/../outside"])
def test_version_1_has_files_of_its_own(groups: Groups, quota: int, cores: int, path: str) -> None:
    """The path is the host's where the container's own group is mounted as the root of all."""
    groups.enter(f"4:cpu,cpuacct:{path}", "3:cpuset:/", "2:memory:/", "0::/")
    groups.write("cpu/cpu.cfs_quota_us", quota)
    groups.write("cpu/cpu.cfs_period_us", 100000)
    assert machine.available_cores() == (cores if ".." not in path else 8)


def test_without_a_quota_the_machines_cores_count(groups: Groups) -> None:
    assert machine.available_cores() == 8
    assert machine.total_memory() == 96 * GIB
    assert 63 * GIB < machine.available_memory() <= 64 * GIB


@pytest.fixture
def container(groups: Groups) -> Groups:
    """It may use 8 GiB and has 7, of which 5 are cached files, 2 of those mapped."""
    groups.enter("0::/")
    groups.write("memory.max", 8 * GIB)
    groups.write("memory.current", 7 * GIB)
    groups.write_counts("memory.stat", anon=2, file=5, shmem=0, file_mapped=2, inactive_file=3, active_file=2)
    return groups


def test_files_that_a_container_has_read_are_not_used_memory(container: Groups) -> None:
    assert machine.available_memory() == (8 - 7 + 3) * GIB
    assert machine.total_memory() == 8 * GIB


def test_tmpfs_and_mapped_files_are_used_memory(container: Groups) -> None:
    container.write_counts("memory.stat", anon=2, file=5, shmem=3, file_mapped=3, inactive_file=1, active_file=1)
    assert machine.available_memory() == (8 - 7) * GIB


def test_a_container_without_a_limit_has_the_machines_memory(container: Groups) -> None:
    container.write("memory.max", "max")
    assert 63 * GIB < machine.available_memory() <= 64 * GIB
    assert machine.total_memory() == 96 * GIB


def test_a_full_container_has_none(container: Groups) -> None:
    container.write("memory.current", 12 * GIB)
    assert machine.available_memory() == 0


def test_memory_limits_of_version_1_groups_are_read(groups: Groups) -> None:
    groups.enter("4:memory:/docker/1f3a", "0::/")
    groups.write("memory/memory.limit_in_bytes", 8 * GIB)
    groups.write("memory/memory.usage_in_bytes", 7 * GIB)
    groups.write_counts("memory/memory.stat", cache=1, total_inactive_file=3, total_active_file=2, total_mapped_file=2)
    assert machine.available_memory() == (8 - 7 + 3) * GIB
    assert machine.total_memory() == 8 * GIB
    groups.write("memory/memory.limit_in_bytes", 9223372036854771712)
    assert machine.total_memory() == 96 * GIB


def test_the_processor_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    machine.processor()  # of a system without such a file
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\n\nprocessor\t: 1\nmodel name\t: Other\n")
    assert machine.processor() == "Fast CPU @ 3 GHz"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert machine.processor() == ""
