"""Messages between the API server and its reader processes: pickles, in which some objects are only named.

A served model is a tokenizer, which both sides have, so only its name and numbers travel. The body of a request stays where it was
read. Both processes are of one installation and trust each other.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.protocol import TokenizerBundle

HEADER_BYTES = 8  # before each pickle, its length, big-endian
BODY, MODEL = "body", "model"  # names of objects that do not travel


@dataclass(frozen=True)
class LoadModel:
    """Make ready the files of a model."""

    name: str
    content_hash: str
    bundle: TokenizerBundle
    template_source: str | None


@dataclass(frozen=True)
class ReadBody:
    """Parse the `size` bytes behind this command into a `schema` and keep the body as `number`. The answer is its head."""

    number: int
    schema: Any  # a model, or a union of models
    size: int


@dataclass(frozen=True)
class Work:
    """Call `function` with `arguments`, in which the body `number` stands for its head. The body is gone then."""

    number: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class DropBody:
    number: int


def pack(value: Any, name: Callable[[Any], Any]) -> bytes:
    """A frame. `name`: what stands for an object instead of its content; None: nothing does."""
    buffer = io.BytesIO()
    buffer.write(bytes(HEADER_BYTES))
    pickler = _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.name = name
    pickler.dump(value)
    buffer.seek(0)
    buffer.write((buffer.getbuffer().nbytes - HEADER_BYTES).to_bytes(HEADER_BYTES))
    return buffer.getvalue()


def unpack(payload: bytes, find: Callable[[Any], Any]) -> Any:
    """A frame's value, without its header. `find`: the object that a name stands for."""
    unpickler = _Unpickler(io.BytesIO(payload))
    unpickler.find = find
    return unpickler.load()


def payload_size(header: bytes) -> int:
    return int.from_bytes(header)


class _Pickler(pickle.Pickler):
    name: Callable[[Any], Any]

    def persistent_id(self, obj: Any) -> Any:
        return self.name(obj)


class _Unpickler(pickle.Unpickler):
    find: Callable[[Any], Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.find(pid)
