"""GGUF, llama.cpp's file format: metadata, tensor table and raw tensor rows. Torch-free.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic "GGUF", version, counts, key-value metadata, tensor table,
padding, tensor data. The header is read here rather than by the `gguf` package, whose reader makes several numpy arrays for every
token of the vocabulary (2 s for 49,152 tokens, against 70 ms); types and their sizes are the package's.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from gpu.errors import CheckpointError

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# metadata value type -> struct format
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# fields that are used here and their types; of an array, the type of its items
_FIELD_TYPES: dict[str, type | tuple[type]] = {
    "general.architecture": str,
    "general.type": str,
    "general.alignment": int,
    "split.count": int,
    "tokenizer.chat_template": str,
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.ggml.tokens": (str,),
    "tokenizer.ggml.merges": (str,),
    "tokenizer.ggml.scores": (float,),
    "tokenizer.ggml.token_type": (int,),
    **{f"tokenizer.ggml.{kind}_token_id": int for kind in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    **{f"tokenizer.ggml.{flag}": bool for flag in ("add_bos_token", "add_eos_token", "add_space_prefix")},
}


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
        name: str | None = self.metadata.get("general.architecture")
        if name is None:
            raise CheckpointError(f"{self.path} does not say its architecture (general.architecture)")
        return name

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
            cursor = _Cursor(content)
            if content[:4] != b"GGUF":
                raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with the letters GGUF")
            cursor.position = 4
            version = cursor.scalar("I")
            if version & 0xFFFF == 0:
                raise CheckpointError(f"{self.path} is a big-endian GGUF file, which is not supported")
            if version not in _VERSIONS:
                raise CheckpointError(
                    f"{self.path} is GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} are supported"
                )
            try:
                num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
                metadata = {}
                for _ in range(num_fields):
                    key = cursor.string()
                    metadata[key] = cursor.value(cursor.scalar("I"))
                table = [_tensor_line(cursor) for _ in range(num_tensors)]
            except (struct.error, EOFError):
                raise CheckpointError(f"{self.path} is cut off: it ends inside its header") from None
            except ValueError as error:
                raise CheckpointError(f"the header of {self.path} is damaged: {error}") from None
            header_bytes = cursor.position
        self._check_types(metadata)
        alignment = metadata.get("general.alignment", 32)
        if alignment < 1:
            raise CheckpointError(f"the header of {self.path} is damaged: alignment {alignment}")
        data_start = -(-header_bytes // alignment) * alignment
        tensors = {}
        for name, shape, type_number, offset in table:
            tensors[name] = TensorInfo(name, shape, _tensor_type(type_number, name, self.path), data_start + offset)
        return metadata, tensors, header_bytes

    def _check_types(self, metadata: dict[str, Any]) -> None:
        for key, expected in _FIELD_TYPES.items():
            value = metadata.get(key)
            if isinstance(expected, tuple):
                right = isinstance(value, list) and all(type(item) is expected[0] for item in value)
            else:
                right = type(value) is expected
            if value is not None and not right:
                raise CheckpointError(f"the metadata of {self.path} has a {key} of the wrong type")

    def _check_extent(self) -> None:
        for tensor in self.tensors.values():
            if tensor.shape[-1] % tensor.block_size:
                raise CheckpointError(
                    f"tensor {tensor.name} of {self.path} has rows of {tensor.shape[-1]}, not a multiple of its block size"
                )
        end = max((tensor.offset + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if end > self.size:
            raise CheckpointError(f"{self.path} is cut off: it has {self.size:,} bytes of {end:,}; download it again")
        part_count = self.metadata.get("split.count", 1)
        if part_count > 1:
            raise CheckpointError(f"{self.path} is one of {part_count} parts of a model; join them with `llama-gguf-split --merge`")


class _Cursor:
    """Reads little-endian values one after the other; raises EOFError or struct.error at the end of the content."""

    def __init__(self, content: mmap.mmap):
        self.content = content
        self.position = 0

    def scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from("<" + format, self.content, self.position)
        self.position += struct.calcsize("<" + format)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self.content):
            raise EOFError
        return self.content[start : self.position].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("I"), self.scalar("Q")
            if count > len(self.content):  # an item has at least a byte: do not trust a count that cannot be
                raise EOFError
            if item_kind in _SCALARS:
                return self._scalars(_SCALARS[item_kind], count)
            return [self.value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def _scalars(self, format: str, count: int) -> list[Any]:
        values = struct.unpack_from(f"<{count}{format}", self.content, self.position)
        self.position += struct.calcsize(f"<{count}{format}")
        return list(values)


def _tensor_line(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= 4:
        raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dimensions)]))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor_type(number: int, name: str, path: Path) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        raise CheckpointError(f"tensor {name} of {path} has a type that is not known here (number {number})") from None
