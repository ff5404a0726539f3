"""Modules whose packages are missing can be imported, and only that."""

import importlib.util
import sys

import pytest

from benchmarks import stand_ins
from benchmarks.stand_ins import Struct

MODULE = """
import absent_numba
from absent_numba.core import cgutils
from absent_numba.extending import intrinsic
from broken_package import anything
from partner import ir

absent_numba.config.CACHE_DIR = "x"
KIND = absent_numba.types.float32(1) | cgutils.voidptr_t[2]

@absent_numba.njit(cache=True, fastmath={"contract"})
@intrinsic
def compiled(x):
    return x

def plain(x):
    return x + 1
"""


@pytest.fixture
def module(monkeypatch, tmp_path):
    monkeypatch.setattr(stand_ins, "PACKAGES", ("absent_numba", "json", "broken_package"))
    monkeypatch.setattr(stand_ins, "PARTNERS", {"absent_numba": "partner"})
    (tmp_path / "broken_package.py").write_text("import json\nraise ImportError('needs an older numpy')")
    (tmp_path / "uses_absent.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with stand_ins.stand_ins() as absent:
        import uses_absent
    assert absent == ["absent_numba", "broken_package", "partner"]
    yield uses_absent
    del sys.modules["uses_absent"]


def test_a_module_imports_and_its_functions_without_the_package_run(module):
    assert module.plain(2) == 3


def test_a_function_that_needs_the_package_names_it(module):
    with pytest.raises(ModuleNotFoundError, match="not installed"):
        module.compiled(2)


def test_a_stood_in_package_is_absent_again_afterwards(module):
    assert importlib.util.find_spec("absent_numba") is None
    with pytest.raises(ModuleNotFoundError):
        import absent_numba  # noqa: F401


def test_stand_in_structs_have_fields_defaults_and_order():
    class Base(Struct, frozen=True):
        row: int
        names: list = []  # noqa: RUF012 (copied for each struct)

    class More(Base, array_like=True):
        step: int = 4

    first, second = Base(1), More(2, ["a"], step=5)
    first.names.append("x")
    assert (Base(1).names, second.row, second.names, second.step, More(row=3).step) == ([], 2, ["a"], 5, 4)
    with pytest.raises(AttributeError):
        Base()
    with pytest.raises(TypeError, match="has no other"):
        Base(1, other=2)
