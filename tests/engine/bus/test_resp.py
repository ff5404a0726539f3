"""Redis' protocol: what is sent, and answers read however they are cut."""

from __future__ import annotations

import pytest
from redis.exceptions import BusyLoadingError, InvalidResponse, NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from engine.bus.resp import Answers, pack

STREAM = b"+OK\r\n:-7\r\n$-1\r\n$6\r\na\r\nb\r\n\r\n*-1\r\n*3\r\n$2\r\nok\r\n*2\r\n:1\r\n$0\r\n\r\n+x\r\n*0\r\n"
ANSWERS = [b"OK", -7, None, b"a\r\nb\r\n", None, [b"ok", [1, b""], b"x"], []]


def test_commands_are_packed_as_arrays_of_strings() -> None:
    assert (
        pack("SET", b"\x00\r\n", 5, 0.5, "ä") == b"*5\r\n$3\r\nSET\r\n$3\r\n\x00\r\n\r\n$1\r\n5\r\n$3\r\n0.5\r\n$2\r\n\xc3\xa4\r\n"
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_answers_are_read_however_they_are_cut(size: int) -> None:
    answers = Answers()
    got = [answer for at in range(0, len(STREAM), size) for answer in answers.feed(STREAM[at : at + size])]
    assert got == ANSWERS


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (b"-NOSCRIPT No matching script.", NoScriptError, "No matching script."),
        (b"-OOM command not allowed", OutOfMemoryError, "command not allowed"),
        (b"-READONLY You can't write", ReadOnlyError, "You can't write"),
        (b"-LOADING Redis is loading", BusyLoadingError, "Redis is loading"),
        (b"-FENCED the slot is another's", ResponseError, "FENCED the slot is another's"),
        (b"-ERR what", ResponseError, "ERR what"),
    ],
)
def test_errors_have_the_classes_of_redis_py(line: bytes, kind: type[Exception], message: str) -> None:
    whole, inner = Answers().feed(line + b"\r\n*1\r\n" + line + b"\r\n")
    for error in (whole, inner[0]):
        assert type(error) is kind and str(error) == message


@pytest.mark.parametrize("data", [b"HTTP/1.1 400\r\n", b"?1\r\n"])
def test_bytes_that_are_no_answer_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidResponse):
        Answers().feed(data)
