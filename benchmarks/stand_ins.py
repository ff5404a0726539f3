"""Stands in for packages that headrace imports and a machine with a GPU may lack, so that the GPU's code can be imported there.

numba and llvmlite make the CPU's kernels, gguf and safetensors read files, psutil measures a CPU's memory, llguidance fills the
masks of grammars. A step on a GPU calls nothing of them, and a call raises ModuleNotFoundError. msgspec's structs are records,
which plain classes are too.
"""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

PACKAGES = ("gguf", "llguidance", "msgspec", "numba", "psutil", "safetensors")
PARTNERS = {"numba": "llvmlite"}  # they take one another's objects: one alone is of no use


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """While it lasts, packages that are not installed, or do not import, can be; yields their names. Imports inside, use behind."""
    absent = [name for name in PACKAGES if not _imports(name)]
    absent = sorted({*absent, *(PARTNERS[name] for name in absent if name in PARTNERS)})
    finder = _Finder(absent)
    sys.meta_path.insert(0, finder)
    _Absent.callable_now = True
    try:
        yield absent
    finally:
        _Absent.callable_now = False
        sys.meta_path.remove(finder)
        for name in absent:
            _forget(name)  # a later check whether the package is there gets the true answer


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # of numba, also for a numpy newer than itself
        _forget(name)
        return False
    return True


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


class _Absent(MagicMock):
    """A name of an absent package. A module may use it in any way at import, also as a decorator."""

    callable_now = True

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if not _Absent.callable_now:
            raise ModuleNotFoundError("called something of a package that is not installed on this machine")
        return super().__call__(*arguments, **keywords)


class Struct:
    """As much of msgspec.Struct as steps need: fields by annotation, in order, with defaults."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__()

    def __init__(self, *values: object, **named: object) -> None:
        fields = [name for kind in reversed(type(self).__mro__) for name in inspect.get_annotations(kind)]
        named |= dict(zip(fields, values, strict=False))
        if unknown := named.keys() - set(fields):
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        for name in fields:
            setattr(self, name, named[name] if name in named else copy.copy(getattr(type(self), name)))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, absent: list[str]) -> None:
        self.absent = absent

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.absent:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "msgspec":
            module.Struct = Struct  # type: ignore[attr-defined]
        made: dict[str, _Absent] = {}

        def absent(name: str) -> _Absent:
            if name.startswith("__"):
                raise AttributeError(name)
            return made.setdefault(name, _Absent(name=f"{module.__name__}.{name}"))

        module.__getattr__ = absent  # type: ignore[method-assign]
