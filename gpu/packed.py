"""Matrices in the layout that their kernel reads, and the file in which the processes of a machine share them.

What packing makes depends on the checkpoint, the numeric class, the rank and the instruction set alone. With a folder for it, the
first process writes it down, and everybody maps the same pages: two engines hold the weights once, and a restarted one does not
read the checkpoint again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.block_matmul import pack_blocks
from kernels.blocks import Blocks
from kernels.cpu_rows import BLOCK_PANEL, HALF_PANEL
from kernels.half_matmul import pack_half

if TYPE_CHECKING:
    from gpu.distributed import TensorParallelGroup
    from gpu.linear import Numerics
    from gpu.weights import Checkpoint

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1  # changes with what packing makes
MOST_MODELS = 4  # kept in a folder; the least recently used go
_INDEX, _DATA, _LOCK = "index.json", "weights.bin", "lock"


@dataclass(frozen=True)
class PackedMatrix:
    """kind: plain (array `weight`), half (`panels`, kernels.half_matmul) or blocks (`codes`, `scales`, kernels.block_matmul)."""

    kind: str
    out_features: int
    in_features: int
    arrays: dict[str, np.ndarray]
    dtype: str = ""  # plain: torch's name of the weight's type; bfloat16 is kept as int16
    bits: int = 0
    block_size: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def tensor(self) -> torch.Tensor:
        """The weight of a plain matrix, in the same memory."""
        return torch.from_numpy(self.arrays["weight"]).view(getattr(torch, self.dtype))

    @classmethod
    def plain(cls, weight: torch.Tensor) -> PackedMatrix:
        kept = weight.view(torch.int16) if weight.dtype is torch.bfloat16 else weight
        name = str(weight.dtype).removeprefix("torch.")
        return cls("plain", weight.shape[0], weight.shape[1], {"weight": kept.numpy()}, dtype=name)

    @classmethod
    def half(cls, weight: torch.Tensor) -> PackedMatrix:
        return cls("half", weight.shape[0], weight.shape[1], {"panels": pack_half(weight.half())})

    @classmethod
    def blocks(cls, blocks: Blocks, in_features: int) -> PackedMatrix:
        packed = pack_blocks(blocks)
        arrays = {"codes": packed.codes, "scales": packed.scales}
        return cls("blocks", len(blocks.codes), in_features, arrays, bits=packed.bits, block_size=packed.block_size)


class PrivateWeights:
    """Packed matrices in this process's own memory."""

    def matrix(self, name: str, pack: Callable[[], PackedMatrix]) -> PackedMatrix:
        """The matrix `name`; `pack` makes it where it is not there yet."""
        return pack()

    def close(self) -> None:
        """All matrices have been asked for."""


class SharedWeights:
    """Packed matrices in a folder's file, mapped. Of several processes at once one packs, the rest wait for it."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where the folder cannot be used."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = (folder / _LOCK).open("a")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # released by the kernel when this process ends, however it ends
        self._index: dict[str, dict[str, Any]] = self._read_index()
        self._is_new = not self._index
        if self._is_new:
            (folder / _DATA).unlink(missing_ok=True)  # who has it mapped keeps it
        self._data: IO[bytes] = (folder / _DATA).open("w+b" if self._is_new else "rb")
        if not self._is_new:
            os.utime(folder)
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def matrix(self, name: str, pack: Callable[[], PackedMatrix]) -> PackedMatrix:
        if self._is_new:
            self._write(name, pack())
        entry = dict(self._index[name])
        arrays = {key: self._map(*place) for key, place in entry.pop("arrays").items()}
        return PackedMatrix(arrays=arrays, **entry)

    def _write(self, name: str, packed: PackedMatrix) -> None:
        places = {}
        for key, array in packed.arrays.items():
            offset = -(-self._data.tell() // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            self._data.seek(offset)
            self._data.write(np.ascontiguousarray(array).data)
            places[key] = (offset, array.dtype.str, array.shape)
        self._data.flush()
        fields = {key: value for key, value in vars(packed).items() if key != "arrays"}
        self._index[name] = {**fields, "arrays": places}

    def _map(self, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Copy on write, which nobody does: torch and numba ask for memory that may be written."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not size:
            return np.zeros(shape, dtype)
        mapped = mmap.mmap(self._data.fileno(), size, access=mmap.ACCESS_COPY, offset=offset)
        return np.frombuffer(mapped, dtype).reshape(shape)

    def close(self) -> None:
        if self._is_new:
            draft = self._folder / (_INDEX + ".new")
            draft.write_text(json.dumps(self._index))
            os.fsync(self._data.fileno())
            draft.rename(self._folder / _INDEX)
            _forget_old(self._folder.parent)
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # a process forked meanwhile would keep it
        self._data.close()
        self._lock.close()

    def _read_index(self) -> dict[str, Any]:
        try:
            index: dict[str, Any] = json.loads((self._folder / _INDEX).read_text())
        except (OSError, ValueError):
            return {}
        places = [place for entry in index.values() for place in entry["arrays"].values()]
        end = max(offset + int(np.prod(shape)) * np.dtype(dtype).itemsize for offset, dtype, shape in places)
        data = self._folder / _DATA
        return index if data.is_file() and data.stat().st_size >= end else {}


def _forget_old(folder: Path) -> None:
    """Keeps the models used last. Who has a file mapped keeps it though its name is gone."""
    entries = sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime, reverse=True)
    for entry in entries[MOST_MODELS:]:
        with suppress(OSError):
            shutil.rmtree(entry)


def packed_identity(checkpoint: Checkpoint, numerics: Numerics, group: TensorParallelGroup) -> str:
    """A name for all that packed weights depend on."""
    parts = [checkpoint.content_hash(), checkpoint.stamp(), str(numerics), f"{group.rank} of {group.size}"]
    parts.append(f"panels {HALF_PANEL} {BLOCK_PANEL}, layout {LAYOUT_VERSION}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def open_weights(folder: str, identity: str) -> PrivateWeights | SharedWeights:
    """Shared under `identity` in `folder`, or private where no folder is named or it cannot be written."""
    if not folder:
        return PrivateWeights()
    try:
        return SharedWeights(Path(folder).expanduser() / identity)
    except OSError as error:
        logger.warning("packed weights are not shared: %s", error)
        return PrivateWeights()
