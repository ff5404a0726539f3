"""GGUF, llama.cpp's file format: metadata, tensor table and raw tensor rows. Torch-free.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic "GGUF", version, counts, key-value metadata, tensor table,
padding, tensor data. The reader of the `gguf` package makes several numpy arrays for every token of the vocabulary. It takes 2 s
for 49,152 tokens, this one 70 ms. Types and their sizes are the package's.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from gpu.checkpoint.fields import TEXT, Fields, Rule, shown
from gpu.errors import CheckpointError

ValueT = TypeVar("ValueT")

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a string
# metadata value type -> struct format
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Bounds of a header, several times what the largest models have. More is a damaged file, which must not fill the memory.
_MOST_HEADER_BYTES = 256 << 20
_MOST_ITEMS = 8 << 20  # of all arrays together
_MOST_FIELDS = _MOST_TENSORS = 1 << 16
_MOST_SIZE = 1 << 40  # of a tensor's dimension

_ALIGNMENT: Rule[int] = Rule(
    "a power of two up to 65,536", lambda value: type(value) is int and 0 < value <= 65536 and value & (value - 1) == 0
)


@dataclass(frozen=True)
class TensorInfo:
    """One line of the tensor table. A row is the contiguous innermost dimension: a whole number of quantization blocks."""

    name: str  # llama.cpp's: "blk.0.attn_q.weight"
    shape: tuple[int, ...]  # numpy's order: [rows, columns] or [columns]
    type: GGMLQuantizationType
    offset: int  # bytes from the start of the file

    @property
    def block_size(self) -> int:
        """Elements in a quantization block."""
        return int(GGML_QUANT_SIZES[self.type][0])

    @property
    def row_bytes(self) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return int(self.shape[-1] // block_size * block_bytes)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """An open file. Its header is read and checked against the file's length; tensor data is read on demand.

    Raises CheckpointError when the file is not GGUF, damaged or cut off.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"the model file {path} cannot be opened: {error.strerror}") from None
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.metadata, self.tensors, self.header_bytes = self._read_header()
            self._check_extent()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, which also begins the keys of its metadata."""
        return self.fields.need("general.architecture", TEXT)

    @property
    def fields(self) -> Fields:
        """The metadata, to be read by type and range."""
        return Fields(str(self.path), self.metadata)

    def read(self, offset: int, size: int) -> bytearray:
        """`size` bytes from `offset` of the file."""
        buffer = bytearray(size)
        view, done = memoryview(buffer), 0
        while done < size:
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{self.path} ended early: it was changed while it was read")
            done += count
        return buffer

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> bytearray:
        """Raw blocks of rows start..stop-1; a vector is one row."""
        return self.read(tensor.offset + start * tensor.row_bytes, (stop - start) * tensor.row_bytes)

    def _read_header(self) -> tuple[dict[str, Any], dict[str, TensorInfo], int]:
        if self.size < 24:
            raise CheckpointError(f"{self.path} is not a GGUF file: it has {self.size} bytes")
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content[:4] != b"GGUF":
                raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with the letters GGUF")
            cursor = _Cursor(content, min(self.size, _MOST_HEADER_BYTES))
            self._check_version(cursor.scalar("I"))
            try:
                num_tensors, num_fields = cursor.count(_MOST_TENSORS, "tensors"), cursor.count(_MOST_FIELDS, "metadata fields")
                metadata = _unique(
                    ((cursor.string(), cursor.value(cursor.scalar("I"))) for _ in range(num_fields)), "metadata field"
                )
                table = _unique((_tensor_line(cursor) for _ in range(num_tensors)), "tensor")
            except (struct.error, EOFError):
                where = (
                    "it ends inside its header" if cursor.end == self.size else f"its header is longer than {cursor.end:,} bytes"
                )
                raise CheckpointError(f"{self.path} is damaged or cut off: {where}") from None
            except ValueError as error:
                raise CheckpointError(f"the header of {self.path} is damaged: {error}") from None
            header_bytes = cursor.position
        alignment = Fields(str(self.path), metadata).get("general.alignment", _ALIGNMENT) or 32
        data_start = -(-header_bytes // alignment) * alignment
        tensors = {}
        for name, (shape, type_number, offset) in table.items():
            if offset % alignment:
                raise CheckpointError(f"the header of {self.path} is damaged: tensor {name} begins at byte {offset:,} of the data")
            tensors[name] = TensorInfo(name, shape, _tensor_type(type_number, name, self.path), data_start + offset)
        return metadata, tensors, header_bytes

    def _check_version(self, version: int) -> None:
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self.path} is a big-endian GGUF file, which is not supported")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path} is GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} are supported"
            )

    def _check_extent(self) -> None:
        for tensor in self.tensors.values():
            if tensor.shape[-1] % tensor.block_size:
                raise CheckpointError(
                    f"tensor {tensor.name} of {self.path} has rows of {tensor.shape[-1]}, not a multiple of its block size"
                )
        end = max((tensor.offset + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if end > self.size:
            raise CheckpointError(f"{self.path} is cut off: it has {self.size:,} bytes of {end:,}; download it again")


class _Cursor:
    """Reads little-endian values one after the other; raises EOFError or struct.error at the end of the header's bytes."""

    def __init__(self, content: mmap.mmap, end: int):
        self.content = content
        self.end = end
        self.position = 4  # behind the magic
        self._items_left = _MOST_ITEMS

    def scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from("<" + format, self.content, self.position)
        self.position += struct.calcsize("<" + format)
        return value

    def count(self, most: int, of: str) -> int:
        """Raises ValueError for more than `most`."""
        count: int = self.scalar("Q")
        if count > most:
            raise ValueError(f"it counts {count:,} {of}")
        return count

    def string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """One after the other. A vocabulary has a hundred thousand, which every start reads: hence no call for each of them."""
        content, end, position, length_at = self.content, self.end, self.position, _LENGTH.unpack_from
        found = []
        for _ in range(count):
            start = position + _LENGTH.size
            position = start + length_at(content, position)[0]
            if position > end:
                raise EOFError
            found.append(content[start:position].decode("utf-8", "replace"))
        self.position = position
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"))
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int) -> list[Any]:
        count = self.count(self._items_left, "items of an array")
        self._items_left -= count
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise ValueError(f"unknown type {kind} of an array's items")
        format = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(format, self.content, self.position)
        self.position += struct.calcsize(format)
        return list(values)


def _unique(pairs: Iterable[tuple[str, ValueT]], kind: str) -> dict[str, ValueT]:
    """Raises ValueError for a name that comes twice."""
    found: dict[str, ValueT] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has the {kind} {shown(name)} twice")
        found[name] = value
    return found


def _tensor_line(cursor: _Cursor) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    """(name, (shape, number of the type, offset in the data))."""
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= 4:
        raise ValueError(f"tensor {shown(name)} has {num_dimensions} dimensions")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dimensions)]))
    if not all(0 < size <= _MOST_SIZE for size in shape):
        raise ValueError(f"tensor {shown(name)} has the shape {list(shape)}")
    return name, (shape, cursor.scalar("I"), cursor.scalar("Q"))


def _tensor_type(number: int, name: str, path: Path) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        raise CheckpointError(f"tensor {name} of {path} has a type that is not known here (number {number})") from None
