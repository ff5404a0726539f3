"""A model's GGUF file, with its further parts where llama.cpp's `llama-gguf-split` has cut it into several. Torch-free.

The parts are named name-00001-of-00003.gguf and so on. The first one has all metadata; each has a tensor table of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpu.checkpoint.fields import Fields, integer
from gpu.checkpoint.gguf import GGUFFile, TensorInfo
from gpu.checkpoint.model_files import PART
from gpu.errors import CheckpointError

_NUMBER = integer(0, 65535)


class GGUFModel(GGUFFile):
    """Everything that is asked of a file, of all parts together. Raises CheckpointError, also where a part is missing."""

    def __init__(self, path: str | os.PathLike[str]):
        """`path`: the file, or the first part."""
        super().__init__(path)
        self.parts: list[GGUFFile] = [self]
        self._part_of: dict[str, GGUFFile] = {}  # by tensor, of those in further parts
        try:
            for part_path in _further_parts(self):
                self._add(GGUFFile(part_path))
            self._check_count()
        except BaseException:
            self.close()
            raise

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> bytearray:
        part = self._part_of.get(tensor.name)
        return super().read_rows(tensor, start, stop) if part is None else part.read_rows(tensor, start, stop)

    def close(self) -> None:
        super().close()
        for part in self.parts[1:]:
            part.close()

    def _add(self, part: GGUFFile) -> None:
        number = len(self.parts)
        self.parts.append(part)
        if _number_of(part) != number or _count_of(part) != _count_of(self):
            where = f"part {_number_of(part) + 1} of {_count_of(part)}"
            raise CheckpointError(f"{part.path} is not what its name says: inside, it is {where}")
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise CheckpointError(f"{part.path} has the tensor {name}, which an earlier part of the model has too")
            self.tensors[name] = tensor
            self._part_of[name] = part

    def _check_count(self) -> None:
        expected = self.fields.get("split.tensors.count", integer(0, 1 << 20))
        if len(self.parts) > 1 and expected is not None and expected != len(self.tensors):
            raise CheckpointError(f"{self.path} counts {expected} tensors, but its parts have {len(self.tensors)}")


def _further_parts(first: GGUFFile) -> list[Path]:
    """Paths of the parts behind `first`, which are all there."""
    count = _count_of(first)
    if count == 1:
        return []
    named = PART.search(first.path.stem)
    stem, suffix = first.path.stem[: named.start() if named else None], first.path.suffix
    names = [f"{stem}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]
    if _number_of(first) != 0:
        raise CheckpointError(f"{first.path} is one of {count} parts of a model: give the path of the first, {names[0]}")
    if first.path.name != names[0]:
        raise CheckpointError(
            f"{first.path} is the first of {count} parts of a model, and must be named {names[0]} beside the others"
        )
    paths = [first.path.with_name(name) for name in names[1:]]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{first.path} is the first of {count} parts of a model; {path.name} is missing beside it")
    return paths


def _count_of(file: GGUFFile) -> int:
    return _field(file, "split.count") or 1


def _number_of(file: GGUFFile) -> int:
    return _field(file, "split.no") or 0


def _field(file: GGUFFile, name: str) -> int | None:
    fields: Fields = file.fields
    return fields.get(name, _NUMBER)
