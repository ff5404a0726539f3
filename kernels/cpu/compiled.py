"""The decorator of the CPU's compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(*, fastmath: frozenset[str] | set[str] = frozenset()) -> Callable[[Callable[..., Any]], Any]:
    """numba's `njit`, kept in its cache, without the GIL, with an arithmetic of its own. `fastmath`: LLVM's flags.

    numba lets a function without flags take those of the first caller that compiles it, and keeps the result in its cache. Its bits
    would then depend on what ran before, in this process or another one. So every function states its flags, also when it has none.
    """
    return numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=set(fastmath) or False)
