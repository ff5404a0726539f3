"""Engines lend each other cores: an engine that is alone has all, each of several busy ones has one, and a dead one has none."""

import errno
import fcntl
import multiprocessing
import os
import shutil

import pytest

from gpu.runner.core_lock import _FLOCK, Cores


@pytest.fixture(autouse=True)
def no_cores_of_this_machine(monkeypatch):
    """Bytes that no engine, and no other run of these tests, locks."""
    monkeypatch.setattr("gpu.runner.core_lock.FIRST_BYTE", os.getpid() << 32)


@pytest.fixture
def make_cores():
    made = []

    def make(count=2, **more):
        made.append(Cores(count, **more))
        return made[-1]

    yield make
    for cores in made:
        cores.close()


def test_an_engine_that_is_alone_has_all_cores(make_cores):
    mine, theirs = make_cores(), make_cores()
    for _ in range(3):
        for cores in (mine, theirs):
            with cores.claim(2) as threads:
                assert threads == 2
            cores.rest()


def test_a_busy_engine_keeps_one_core_between_its_steps(make_cores):
    mine, theirs = make_cores(), make_cores()
    for _ in range(3):
        with theirs.claim(1) as decode, mine.claim(2) as prompt:
            assert (decode, prompt) == (1, 1)
        with mine.claim(2) as prompt:
            assert prompt == 1
    theirs.rest()
    with mine.claim(2) as prompt:
        assert prompt == 2


def test_an_engine_that_found_no_core_has_one_from_the_next_step_on(make_cores):
    mine, theirs, third = make_cores(), make_cores(), make_cores()
    with mine.claim(2) as alone:
        assert alone == 2
        with theirs.claim(2) as threads:
            assert threads == 1
    with mine.claim(2) as threads:
        assert threads == 1, "somebody has none"
        with theirs.claim(2) as own, third.claim(2) as none:
            assert (own, none) == (1, 1)
    theirs.rest()
    with mine.claim(2) as threads:
        assert threads == 1, "the third has none still"
    third.rest()
    with mine.claim(2) as threads:
        assert threads == 2


def test_a_step_that_finds_no_core_still_runs(make_cores):
    mine, theirs = make_cores(), make_cores()
    with mine.claim(2), theirs.claim(2) as threads:
        assert threads == 1


def test_a_step_holds_no_more_cores_than_it_wants(make_cores):
    mine, theirs = make_cores(8), make_cores(8)
    with mine.claim(3) as three, theirs.claim(8) as five:
        assert (three, five) == (3, 5)


def test_a_failing_step_gives_its_cores_back(make_cores):
    mine, theirs = make_cores(), make_cores()
    with pytest.raises(RuntimeError), mine.claim(2):
        raise RuntimeError("the step failed")
    with theirs.claim(2) as threads:
        assert threads == 2


def test_a_killed_engine_holds_no_core(make_cores):
    def die_in_a_step():
        with Cores(2).claim(2) as threads:
            os._exit(threads)

    process = multiprocessing.get_context("fork").Process(target=die_in_a_step)
    process.start()
    process.join()
    assert process.exitcode == 2
    with make_cores().claim(2) as threads:
        assert threads == 2


def test_engines_before_and_after_a_tidy_of_temporary_files_see_each_other(make_cores, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = make_cores()
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    after = make_cores()
    with before.claim(1), after.claim(2) as threads:
        assert threads == 1


def test_a_file_that_the_process_opens_and_closes_takes_no_claim_with_it(make_cores):
    mine, theirs = make_cores(), make_cores()
    with mine.claim(2):
        with open(os.devnull, "w"):
            pass
        with theirs.claim(2) as threads:
            assert threads == 1


def test_without_locks_every_step_has_all_the_cores_that_it_wants(make_cores, monkeypatch, caplog):
    """As a security module may forbid them, which lets everybody ask who holds one."""
    fcntl_as_it_is = fcntl.fcntl

    def forbid(file, command, argument):
        if command == fcntl.F_OFD_SETLK:
            raise PermissionError(errno.EACCES, "Permission denied")
        return fcntl_as_it_is(file, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", forbid)
    with make_cores().claim(2) as threads:
        assert threads == 2
    assert "busy" in caplog.text


def test_without_the_lock_file_every_step_has_all_the_cores_that_it_wants(tmp_path, make_cores, caplog):
    with make_cores(file=tmp_path / "nothing").claim(2) as threads:
        assert threads == 2
    assert "busy" in caplog.text


def test_a_lock_of_another_program_on_all_bytes_leaves_every_step_what_it_wants(tmp_path, make_cores, caplog):
    """As dockerd has on its standard input."""
    path = tmp_path / "shared"
    path.touch()
    with open(path, "rb") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        with make_cores(file=path).claim(2) as threads:
            assert threads == 2
    assert "no engine" in caplog.text


def test_a_lock_on_the_standard_input_of_a_daemon_is_none_on_cores(make_cores):
    with open(os.devnull, "rb") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        with make_cores().claim(2) as threads:
            assert threads == 2
