"""A reader process (`python -m api.preparation.reader`, started by `readers`): reads large bodies, so that no event loop waits.

Parsing, templates and tokenizers hold the interpreter's lock for a time that grows with the body; in another process that delays
no other client. Commands come in on standard input and are answered in order on standard output. The process ends at the end of its
input, that is with its API server.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import cache
from typing import Any, BinaryIO

from pydantic import BaseModel, TypeAdapter, ValidationError

from api.errors import ApiError, InvalidRequest
from api.model_files import ModelFiles, ServedModel, make_model_files
from api.preparation.parcels import BODY, HEADER_BYTES, MODEL, DropBody, LoadModel, ReadBody, Work, pack, payload_size, unpack
from api.request.schemas import body_head

logger = logging.getLogger("headrace.reader")

NICENESS = 5  # behind engines and event loops, which others wait for


class Reader:
    """The state of a reader process between commands. `commands`: where they, and bodies, come in."""

    def __init__(self, commands: BinaryIO) -> None:
        self._commands = commands
        self._bodies: dict[int, BaseModel] = {}
        self._files: dict[str, ModelFiles] = {}

    def answer(self, payload: bytes) -> bytes:
        """The answer's frame: (True, the result) or (False, an ApiError)."""
        try:
            return pack((True, self._obey(unpack(payload, self._find))), _name)
        except ApiError as error:
            return pack((False, error), _name)
        except BaseException as error:  # the tokenizers' library panics, which is no Exception
            logger.error("a command failed", exc_info=error)
            return pack((False, ApiError("Internal server error.")), _name)

    def _obey(self, command: Any) -> Any:
        match command:
            case LoadModel(name, content_hash, bundle, template_source):
                self._files[content_hash] = make_model_files(name, content_hash, bundle, template_source)
            case ReadBody(number, schema, size):
                self._bodies[number] = body = _parse(schema, self._commands.read(size))
                return body_head(body)
            case Work(number, function, arguments):
                self._bodies.pop(number)
                return function(*arguments)
            case DropBody(number):
                self._bodies.pop(number, None)
        return None

    def _find(self, name: tuple[str, Any]) -> Any:
        kind, which = name
        if kind == BODY:
            return self._bodies[which]
        content_hash, outline = which
        return ServedModel(*(*outline, self._files[content_hash]))


def _name(value: Any) -> Any:
    return (MODEL, None) if isinstance(value, ServedModel) else None  # the API server knows which one it gave


def _parse(schema: Any, raw: bytes) -> BaseModel:
    try:
        body: BaseModel = _adapter(schema).validate_json(raw)
    except ValidationError as error:
        raise InvalidRequest.of_body(error) from None
    return body


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def run(commands: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the input's end."""
    reader = Reader(commands)
    while len(header := commands.read(HEADER_BYTES)) == HEADER_BYTES:
        answers.write(reader.answer(commands.read(payload_size(header))))
        answers.flush()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the API server ends this one
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    os.nice(NICENESS)
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not be taken for an answer
        try:
            run(sys.stdin.buffer, answers)
        except BrokenPipeError:
            return 0  # the API server ended first
    return 0


if __name__ == "__main__":
    sys.exit(main())
