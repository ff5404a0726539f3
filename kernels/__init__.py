"""Pure functions on tensors, one file an operation. Importing this package says where numba keeps compiled kernels.

Numba's own cache compares the age of a kernel's file alone, not of the files whose functions it inlines, and stands beside the
source, which an installed package may not write. So it gets a directory of ours, named by a hash of all kernel sources.
`NUMBA_CACHE_DIR`, where set, says where that directory is made. Directories of other versions are removed after a month without
use.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numba

_NAME = re.compile("kernels-[0-9a-f]{16}")  # the folder may hold others' things
_UNUSED_SECONDS = 30 * 86400.0


def _cache_directory() -> Path:
    digest = hashlib.sha256()
    for path in sorted(path for folder in (".", "cpu") for path in (Path(__file__).parent / folder).glob("*.py")):
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    try:
        told = os.environ.get("NUMBA_CACHE_DIR")
        folder = Path(told) if told else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            os.utime(path)
            _remove_unused(folder)
            return path
    except (OSError, RuntimeError):  # no home, or none that can be written
        pass
    # Compiled code is executed: nobody else may be able to put some there. A directory that this process alone uses costs a
    # compilation at every start, which only users without a home directory pay.
    private = tempfile.mkdtemp(prefix="headrace-kernels-")
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return Path(private)


def _remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        if not _NAME.fullmatch(path.name):
            continue
        with suppress(FileNotFoundError):  # another process was faster
            if time.time() - path.stat().st_mtime > _UNUSED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


CACHE_DIRECTORY = _cache_directory()
numba.config.CACHE_DIR = str(CACHE_DIRECTORY)  # type: ignore[attr-defined]  # made at import, out of the environment
