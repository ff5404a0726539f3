"""The file in which the processes of a machine share their packed matrices.

Packed matrices depend on the checkpoint, the numeric class, the rank and the instruction set alone. If there is a folder for them,
the first process writes them into a file, and all processes map the same pages. Two engines hold the weights once, and a restarted
engine does not read the checkpoint again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpu.checkpoint.packed_matrix import PackedMatrix
from gpu.checkpoint.weights import Checkpoint
from gpu.distributed import TensorParallelGroup
from gpu.file_lock import lock_file, unlock_file
from gpu.numerics import Numerics
from kernels.cpu.tiles import BLOCK_PANEL, HALF_PANEL

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 4  # changes with what packing makes
MOST_MODELS = 4  # kept in a folder; the least recently used go
_NAME = re.compile(r"[0-9a-f]{32}-\d+-of-\d+\.weights")
_STEP = re.compile(r"([0-9a-f]{32})-\d+-of-\d+-[0-9a-f]{16}\.step")  # by gpu.runner.step_profile
_LENGTH = struct.Struct("<Q")  # of the index, the file's last bytes


class PrivateWeights:
    """Packed matrices in this process's own memory."""

    def matrix(self, name: str, pack: Callable[[], PackedMatrix]) -> PackedMatrix:
        """The matrix `name`; `pack` makes it where it is not there yet."""
        return pack()

    def close(self) -> None:
        """All matrices have been asked for."""

    def abandon(self) -> None:
        """Not all matrices will be asked for."""


class SharedWeights:
    """Packed matrices in a mapped file. If several processes need it at once, one packs and the others wait.

    A file has its name only when it is whole. An error of the disk costs a warning and private memory, not the start.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where there is no file and none can be made."""
        self._path, self._draft = path, path.with_suffix(".new")
        self._data: IO[bytes] | None = None
        self._lock: int | None = None
        self._index = self._open_whole()
        self._is_new = False
        if self._index is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(path.with_suffix(".lock"), "another process packs these weights")
            try:
                self._open_locked()
            except BaseException:
                self._unlock()
                raise

    def matrix(self, name: str, pack: Callable[[], PackedMatrix]) -> PackedMatrix:
        """The matrix `name`, mapped; `pack` makes it where the file does not have it."""
        assert self._index is not None
        if self._data is None:
            return pack()
        if name not in self._index:
            packed = pack()
            if not self._is_new:  # packed by another version of this program
                return packed
            try:
                self._write(name, packed)
            except OSError as error:
                self._give_up(error)
                return packed
        entry = dict(self._index[name])
        arrays = {key: self._map(*place) for key, place in entry.pop("arrays").items()}
        return PackedMatrix(arrays=arrays, **entry)

    def close(self) -> None:
        """All matrices have been asked for: a new file gets its name."""
        if self._is_new and self._data is not None:
            try:
                self._finish()
            except OSError as error:
                self._give_up(error)
        if self._data is not None:
            self._data.close()
        self._unlock()

    def abandon(self) -> None:
        """Not all matrices will be asked for: a new file is dropped, and processes that wait for it make their own.
        Matrices that are mapped stay mapped."""
        if self._lock is not None:  # else the draft is another process's
            with suppress(OSError):
                self._draft.unlink(missing_ok=True)
        if self._data is not None:
            with suppress(OSError):  # what it has not written yet
                self._data.close()
        self._data = None
        self._unlock()

    def _open_locked(self) -> None:
        """Opens what another process made while this one waited, else a draft."""
        self._index = self._open_whole()
        if self._index is not None:
            self._unlock()
            return
        self._index, self._is_new = {}, True
        self._draft.unlink(missing_ok=True)  # of a process that died while it packed
        self._data = self._draft.open("w+b")

    def _open_whole(self) -> dict[str, dict[str, Any]] | None:
        """Opens the file and returns its index; None where there is none that can be read."""
        try:
            data = self._path.open("rb")
        except FileNotFoundError:
            return None
        try:
            index = _read_index(data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("%s is damaged and made anew: %s", self._path, error)
            data.close()
            return None
        self._data = data
        with suppress(OSError):  # it may not be ours
            os.utime(self._path)
        return index

    def _write(self, name: str, packed: PackedMatrix) -> None:
        assert self._data is not None and self._index is not None
        places = {}
        for key, array in packed.arrays.items():
            offset = -(-self._data.tell() // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            self._data.seek(offset)
            self._data.write(np.ascontiguousarray(array).data)
            places[key] = (offset, array.dtype.str, array.shape)
        self._data.flush()
        fields = {key: value for key, value in vars(packed).items() if key != "arrays"}
        self._index[name] = {**fields, "arrays": places}

    def _finish(self) -> None:
        """The index and its length in the end, the name, and fewer old files."""
        assert self._data is not None
        index = json.dumps(self._index).encode()
        self._data.write(index + _LENGTH.pack(len(index)))
        self._data.flush()
        os.fsync(self._data.fileno())
        self._draft.rename(self._path)
        _forget_old(self._path.parent)

    def _give_up(self, error: OSError) -> None:
        """Keep matrices in private memory from now on."""
        logger.warning("packed weights are not kept in %s: %s", self._path.parent, error)
        self.abandon()

    def _map(self, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Copy on write, though nothing writes: torch and numba ask for memory that may be written."""
        assert self._data is not None
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not size:
            return np.zeros(shape, dtype)
        mapped = mmap.mmap(self._data.fileno(), size, access=mmap.ACCESS_COPY, offset=offset)
        return np.frombuffer(mapped, dtype).reshape(shape)

    def _unlock(self) -> None:
        if self._lock is not None:
            unlock_file(self._lock)
            self._lock = None


def _read_index(data: IO[bytes]) -> dict[str, dict[str, Any]]:
    """Raises ValueError, TypeError, KeyError or AttributeError where it is none."""
    end = data.seek(0, os.SEEK_END)
    data.seek(max(0, end - _LENGTH.size))
    (length,) = _LENGTH.unpack(data.read().rjust(_LENGTH.size, b"\0"))
    begin = end - _LENGTH.size - length
    if begin < 0:
        raise ValueError("it has no index")
    data.seek(begin)
    index: dict[str, dict[str, Any]] = json.loads(data.read(length))
    for entry in index.values():
        for offset, dtype, shape in entry["arrays"].values():
            if offset + int(np.prod(shape)) * np.dtype(dtype).itemsize > begin:
                raise ValueError("its index names more than it holds")
    return index


def _forget_old(folder: Path) -> None:
    """Remove all but the models used last. A process that has a removed file mapped keeps it. Other files stay."""
    used: dict[str, float] = {}
    files = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    for path in files:
        with suppress(FileNotFoundError):  # another process may remove it too
            used[path.name[:32]] = max(used.get(path.name[:32], 0.0), path.stat().st_mtime)
    kept = sorted(used, key=lambda model: used[model], reverse=True)[:MOST_MODELS]
    for path in files:
        if path.name[:32] not in kept:
            with suppress(OSError):
                path.unlink()
                path.with_suffix(".lock").unlink()
    for path in folder.iterdir():
        if (found := _STEP.fullmatch(path.name)) and found[1] not in kept:
            path.unlink(missing_ok=True)


def packed_name(checkpoint: Checkpoint, numerics: Numerics, group: TensorParallelGroup) -> str:
    """A file's name for all that packed weights depend on, the model's part before the rank's."""
    parts = [checkpoint.content_hash(), checkpoint.stamp(), str(numerics)]
    parts.append(f"panels {HALF_PANEL} {BLOCK_PANEL}, layout {LAYOUT_VERSION}")
    model = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return f"{model}-{group.rank}-of-{group.size}.weights"


def open_weights(folder: str, name: str) -> PrivateWeights | SharedWeights:
    """Shared as the file `name` in `folder`, or private where no folder is named or it cannot be written."""
    if not folder:
        return PrivateWeights()
    try:
        return SharedWeights(Path(folder).expanduser() / name)
    except OSError as error:
        logger.warning("packed weights are not shared: %s", error)
        return PrivateWeights()
