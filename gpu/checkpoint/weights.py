"""Checkpoints: named tensors on disk, in any supported format, read shard by shard; and random ones for tests.

A checkpoint yields one tensor at a time, or the rows and columns of it that a tensor parallel rank wants. So loading needs little
more memory than the weights kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray

from gpu.checkpoint.architecture import ArchitectureConfig
from gpu.checkpoint.fields import Fields, Rule
from gpu.checkpoint.gguf import TensorInfo
from gpu.checkpoint.gguf_architecture import architecture_config, gguf_name, permuted_heads
from gpu.checkpoint.gguf_blocks import SUPPORTED_TYPES, dequantize, in_blocks, split_blocks
from gpu.checkpoint.gguf_model import GGUFModel
from gpu.checkpoint.model_files import find_model, read_json
from gpu.errors import CheckpointError
from kernels.cpu.quantized_blocks import Blocks

logger = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 1 << 20  # dequantized at a time: 4 MB of float32, which stays in the cache
ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")  # matrices whose columns are divided among ranks
_WEIGHT_MAP: Rule[dict[str, str]] = Rule(
    "an object that names for each tensor a file in the same directory",
    lambda value: (
        type(value) is dict and bool(value) and all(type(name) is str and Path(name).name == name for name in value.values())
    ),
)
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # of safetensors


class Checkpoint(ABC):
    """The weights of one model under their Hugging Face names."""

    def __init__(self, config: ArchitectureConfig):
        self.config = config
        self.shapes = config.tensor_shapes()

    def names(self) -> list[str]:
        """Names of all tensors; tied weights are named once, as the embedding."""
        return list(self.shapes)

    def tensor(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """The tensor `name`, or rows (of dimension 0) and columns (of dimension 1) of it, as contiguous CPU memory of its own.

        Only what is asked for is read and converted. Slices have step 1. Raises CheckpointError when it is missing or damaged.
        """
        shape = self.shapes.get(name)
        if shape is None:
            raise CheckpointError(f"{self.describe()} has no tensor {name!r}")
        row_range = range(*(rows or slice(None)).indices(shape[0]))
        column_range = range(*(columns or slice(None)).indices(shape[1])) if len(shape) == 2 else None
        if row_range.step != 1 or (column_range is not None and column_range.step != 1) or (columns and column_range is None):
            raise ValueError(f"cannot cut {rows}, {columns} out of {name} of shape {shape}")
        return self._read(name, dtype, row_range, column_range).contiguous()

    def blocks(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Blocks | None:
        """The matrix `name`, or rows and columns of it, as the file quantizes it; None where it does not.

        Raises CheckpointError where the columns cut through blocks.
        """
        return None

    is_quantized = False  # some matrix is in blocks

    def divides_blocks(self, num_ranks: int) -> bool:
        """Whether every rank's columns of a row-parallel matrix are whole blocks."""
        return True

    def stamp(self) -> str:
        """Changes when the files do, though not their lengths and headers; empty: no files."""
        return ""

    @abstractmethod
    def _read(self, name: str, dtype: torch.dtype, rows: range, columns: range | None) -> torch.Tensor:
        """The wanted part; `columns` is None for a vector."""

    @abstractmethod
    def content_hash(self) -> str:
        """Identity of the weights: hex, equal for equal files wherever they lie; cheap (sizes and headers, no weights read)."""

    @abstractmethod
    def describe(self) -> str:
        """How error messages call it."""

    def close(self) -> None:  # noqa: B027 (optional: dummy weights have no files)
        """Closes files. Tensors read before stay valid."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_checkpoint(path: str) -> Checkpoint:
    """A GGUF file or a safetensors directory. Every tensor the architecture needs is there, in its shape, when this returns.

    Raises CheckpointError with the reason otherwise.
    """
    place = find_model(path)
    return SafetensorsCheckpoint(place) if place.is_dir() else GGUFCheckpoint(place)


class SafetensorsCheckpoint(Checkpoint):
    """A directory with config.json and either model.safetensors or the shards of model.safetensors.index.json."""

    def __init__(self, folder: Path):
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} is not a model directory: it has no config.json")
        super().__init__(ArchitectureConfig.from_hf_config(read_json(path), str(path)))
        self.folder = folder
        self._files = {path: _open_safetensors(path) for path in _safetensors_files(folder)}
        self._file_of = {name: file for file in self._files.values() for name in file.keys()}
        _check_shapes(self, {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()})
        for name in self.names():
            if (kind := self._file_of[name].get_slice(name).get_dtype()) not in _FLOAT_TYPES:
                known = ", ".join(_FLOAT_TYPES)
                raise CheckpointError(f"tensor {name} of {self.describe()} has type {kind}; only {known} are supported")

    def _read(self, name: str, dtype: torch.dtype, rows: range, columns: range | None) -> torch.Tensor:
        source = self._file_of[name].get_slice(name)
        part: torch.Tensor = (
            source[rows.start : rows.stop] if columns is None else source[rows.start : rows.stop, columns.start : columns.stop]
        )
        # the part may be a view of the mapped file: a copy stays valid when the file is replaced
        return part.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def content_hash(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())
        for path in self._files:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                digest.update(b"%d" % path.stat().st_size + file.read(length) + _sample(path))
        return digest.hexdigest()

    def stamp(self) -> str:
        return " ".join(_stamp(path) for path in self._files)

    def describe(self) -> str:
        return str(self.folder)

    def close(self) -> None:
        self._files.clear()
        self._file_of.clear()


class GGUFCheckpoint(Checkpoint):
    """A GGUF file, or the parts of one: dequantized as it is read, or its blocks as they are."""

    def __init__(self, path: Path):
        self._file = GGUFModel(path)
        try:
            super().__init__(architecture_config(self._file))
            found = {name: self._file.tensors.get(gguf_name(name)) for name in self.shapes}
            self._tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
            _check_shapes(self, {name: tensor.shape for name, tensor in self._tensors.items()})
            self._check_types()
            self.is_quantized = any(in_blocks(tensor.type) for tensor in self._tensors.values())
        except BaseException:
            self._file.close()
            raise

    def _check_types(self) -> None:
        for tensor in self._tensors.values():
            if tensor.type not in SUPPORTED_TYPES:
                known = ", ".join(sorted(type.name for type in SUPPORTED_TYPES))
                raise CheckpointError(
                    f"tensor {tensor.name} of {self.describe()} is quantized as {tensor.type.name}; supported are {known}"
                )

    def _read(self, name: str, dtype: torch.dtype, rows: range, columns: range | None) -> torch.Tensor:
        tensor = self._tensors[name]
        if columns is None and len(tensor.shape) == 1:
            return self._read_vector(name, tensor)[rows.start : rows.stop].to(dtype)
        assert columns is not None
        result = torch.empty(len(rows), len(columns), dtype=dtype)
        step = max(1, _CHUNK_ELEMENTS // tensor.shape[1])
        for start in range(0, len(rows), step):
            wanted = rows[start : start + step]
            result[start : start + len(wanted)] = torch.from_numpy(self._read_rows(name, tensor, wanted, columns))
        return result

    def _read_rows(self, name: str, tensor: TensorInfo, rows: range, columns: range) -> NDArray[np.float32]:
        """[len(rows), len(columns)]: only the blocks that hold them are dequantized."""
        source = self._source_rows(name, tensor.shape[0])[rows.start : rows.stop]
        first, last = int(source.min()), int(source.max())
        blocks = np.frombuffer(self._file.read_rows(tensor, first, last + 1), np.uint8).reshape(-1, tensor.row_bytes)
        size = tensor.block_size
        block_bytes = tensor.row_bytes * size // tensor.shape[1]
        first_block, stop_block = columns.start // size, -(-columns.stop // size)
        wanted = blocks[source - first, first_block * block_bytes : stop_block * block_bytes]
        offset = columns.start - first_block * size
        return dequantize(wanted, tensor.type)[:, offset : offset + len(columns)]

    def blocks(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Blocks | None:
        tensor = self._tensors[name]
        source = self._source_rows(name, tensor.shape[0])[rows or slice(None)]
        first, last = int(source.min()), int(source.max())
        raw = np.frombuffer(self._file.read_rows(tensor, first, last + 1), np.uint8).reshape(-1, tensor.row_bytes)
        whole = split_blocks(raw[source - first], tensor.type)
        if whole is None or columns is None:
            return whole
        try:
            return whole.columns(*columns.indices(tensor.shape[1])[:2])
        except ValueError as error:
            raise CheckpointError(
                f"tensor {name} cannot be divided among the ranks as it is quantized: {error}; use --quantization none"
            ) from None

    def divides_blocks(self, num_ranks: int) -> bool:
        row_parallel = [tensor for name, tensor in self._tensors.items() if name.endswith(ROW_PARALLEL)]
        return all(tensor.shape[1] % (num_ranks * tensor.block_size) == 0 for tensor in row_parallel)

    def stamp(self) -> str:
        return " ".join(_stamp(part.path) for part in self._file.parts)

    def _read_vector(self, name: str, tensor: TensorInfo) -> torch.Tensor:
        blocks = np.frombuffer(self._file.read_rows(tensor, 0, 1), np.uint8).reshape(1, -1)
        return torch.from_numpy(dequantize(blocks, tensor.type)[0][self._source_rows(name, tensor.shape[0])])

    def _source_rows(self, name: str, num_rows: int) -> NDArray[np.intp]:
        """For each row in Hugging Face's order, the row in the file.

        Within a head of a llama file, dimensions i and i + head_dim / 2, which rotate together, stand side by side.
        """
        index = np.arange(num_rows)
        heads = permuted_heads(self._file, name, self.config.num_heads, self.config.num_kv_heads)
        return index.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1) if heads else index

    def content_hash(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())
        for part in self._file.parts:
            digest.update(b"%d" % part.size + part.read(0, part.header_bytes) + _sample(part.path))
        return digest.hexdigest()

    def describe(self) -> str:
        return str(self._file.path)

    def close(self) -> None:
        self._file.close()


class DummyCheckpoint(Checkpoint):
    """Random weights for tests and benchmarks: uniform noise with variance 1/in_features, norms 1.

    An element depends only on (seed, tensor name, its index): a shard has the same values under any tensor parallel size.
    """

    def __init__(self, config: ArchitectureConfig, seed: int = 0):
        super().__init__(config)
        self.seed = seed

    def _read(self, name: str, dtype: torch.dtype, rows: range, columns: range | None) -> torch.Tensor:
        if columns is None:
            size = len(rows)
            noise = _noise(self.seed, name, rows.start, size) if name.endswith(".bias") else np.full(size, 1.0, np.float32)
            return torch.from_numpy(noise).to(dtype)
        width = self.shapes[name][1]
        noise = _noise(self.seed, name, rows.start * width, len(rows) * width).reshape(len(rows), width)
        noise *= width**-0.5
        return torch.from_numpy(noise)[:, columns.start : columns.stop].to(dtype)

    def content_hash(self) -> str:
        return hashlib.sha256(json.dumps([asdict(self.config), self.seed], sort_keys=True).encode()).hexdigest()

    def describe(self) -> str:
        return "the dummy checkpoint"


def _noise(seed: int, name: str, start: int, count: int) -> NDArray[np.float32]:
    """Elements start..start+count-1 of the stream of (seed, name): float32, uniform, mean 0, variance 1.

    Philox is counter-based, so that the middle of a stream costs no more than its head; a counter gives 4 words of 64 bits.
    """
    key = np.frombuffer(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], np.uint64)
    generator = np.random.Philox(key=key)
    skipped = start % 8
    generator.advance(start // 8)
    words = generator.random_raw((skipped + count + 1) // 2).view(np.uint32)[skipped : skipped + count]
    return (words.astype(np.float32) * 2.0**-31 - 1.0) * np.float32(3**0.5)


def _safetensors_files(folder: Path) -> list[Path]:
    """The files that hold the weights: the index's shards where there is an index, else model.safetensors.

    An index that cannot be followed is ignored with a warning where model.safetensors stands beside it.
    """
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            return _shards(index)
        except CheckpointError as error:
            if not whole.is_file():
                raise
            logger.warning("%s; %s is read instead", error, whole)
    if whole.is_file():
        return [whole]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} has its weights in pickled PyTorch files, which are not safe to load; convert them to safetensors"
        )
    raise CheckpointError(f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json")


def _shards(index: Path) -> list[Path]:
    """Raises CheckpointError where one is missing."""
    fields = Fields(str(index), read_json(index))
    names = fields.need("weight_map", _WEIGHT_MAP).values()
    shards = [index.parent / name for name in sorted(set(names))]
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"{index} names the weights file {shard.name}, which is missing")
    return shards


def _open_safetensors(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"the weights file {path} cannot be opened: damaged or cut off ({error})") from None


def _check_shapes(checkpoint: Checkpoint, found: dict[str, tuple[int, ...]]) -> None:
    for name, shape in checkpoint.shapes.items():
        if name not in found:
            model = f"a {checkpoint.config.architecture} model of its configuration"
            raise CheckpointError(f"{checkpoint.describe()} has no tensor {name!r}, which {model} needs")
        if found[name] != shape:
            wrong, right = list(found[name]), list(shape)
            raise CheckpointError(
                f"tensor {name} of {checkpoint.describe()} has shape {wrong}, but its configuration asks for {right}"
            )


def _stamp(path: Path) -> str:
    """Of a file's size and times. A copy may keep the time of its original; when it came here, no ordinary command can set."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _sample(path: Path, size: int = 4096) -> bytes:
    """A little of a file's middle and end: files of equal layout and different values must differ in hash."""
    with path.open("rb") as file:
        length = path.stat().st_size
        parts = []
        for offset in (length // 2, max(0, length - size)):
            file.seek(offset)
            parts.append(file.read(size))
    return b"".join(parts)
