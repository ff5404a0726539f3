"""Values for everything that is sent to Redis: `Call` (a script or plain commands, and how to read the answer) and `Script`.

A call does no I/O, so that the blocking and the asyncio bus share every operation. Calls may be sent twice: where an answer is lost
on the way, the bus sends the same call again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")

Argument = str | bytes | int | float
Command = tuple[Argument, ...]

LUA = Path(__file__).parent / "lua"
# Scripts that Redis refuses when it is out of memory. All others go on with what is there, or end it.
ADMITTING = frozenset({"accepts", "commit", "enqueue", "stage"})


class Trouble(StrEnum):
    """Why Redis does not serve now, as the rest of a sentence that begins with its name."""

    AWAY = "is not reachable"
    LOADING = "is loading its data"
    BUSY = "is busy with a script"
    MEMORY = "is out of memory"
    DISK = "cannot save to its disk and takes no writes"
    READ_ONLY = "is a read-only replica"
    REPLICAS = "lacks the replicas without which it takes no writes"
    MASTER = "is a replica without its master"
    CLIENTS = "has as many clients as it allows"
    PROTECTED = "refuses clients of other machines"
    CERTIFICATE = "has a certificate that is not trusted"
    PASSWORD = "does not accept this user and password"


class BusUnavailable(Exception):
    """Redis does not serve, and did not for as long as the bus is patient. The text says what is wrong with it."""

    def __init__(self, detail: str, trouble: Trouble = Trouble.AWAY) -> None:
        super().__init__(f"Redis {trouble}: {detail}")
        self.trouble = trouble


class UnfitRedis(Exception):
    """Redis answers and will never do: it is too old, has no such database, or its user has not the rights. The text says which."""


class Fenced(Exception):
    """Another incarnation owns the slot: the engine must drop everything and start again."""


class Unowned(Exception):
    """The slot has no owner: Redis was wiped. The engine claims the slot again and tells Redis what it holds."""


def milliseconds(seconds: float) -> int:
    """A duration as Redis takes it."""
    return max(1, round(seconds * 1000))


def seconds_of(answer: Sequence[bytes]) -> float:
    """The answer of TIME in epoch seconds."""
    seconds, microseconds = answer
    return int(seconds) + int(microseconds) / 1e6


def flat(fields: Mapping[str, Argument]) -> list[Argument]:
    """The fields of a hash as scripts take them: the number of names and values, then these."""
    return [2 * len(fields), *chain.from_iterable(fields.items())]


@dataclass(frozen=True)
class Script:
    name: str
    source: str
    sha: str


@cache
def script(name: str, *libraries: str) -> Script:
    """The script `lua/<name>.lua` behind the libraries that it names.

    With the `#!lua` line Redis refuses a whole script when it is out of memory. Without it the script would fail half done, at its
    first write that needs memory. Scripts that admit nothing run even then: what was admitted must get on and end, or no memory is
    freed.
    """
    parts = [(LUA / f"{part}.lua").read_text(encoding="utf-8") for part in (*libraries, name)]
    flags = "" if name in ADMITTING else " flags=allow-oom"
    source = "\n".join((f"#!lua{flags}", *parts))
    return Script(name, source, hashlib.sha1(source.encode()).hexdigest())


class Call(msgspec.Struct, Generic[T_co], frozen=True):
    """One operation. `decode` gets the script's answer, or the list of the commands' answers, all as RESP2 gives them (bytes, int,
    None, lists); where it returns a further Call, the bus runs that one and returns its result.
    """

    decode: Callable[[Any], T_co | Call[T_co]]
    script: Script | None = None
    keys: tuple[str, ...] = ()
    arguments: tuple[Argument, ...] = ()
    commands: tuple[Command, ...] = ()
    transaction: bool = False  # commands in MULTI/EXEC
    keep_errors: bool = False  # a command's error is its answer instead of an exception
    block: float = 0.0  # seconds that Redis may hold the answer back

    def then(self, follow: Callable[[T_co], Call[U]]) -> Call[U]:
        """This call, and with its result the next one."""

        def decode(answers: Any) -> Call[U]:
            result = self.decode(answers)
            return result.then(follow) if isinstance(result, Call) else follow(result)

        return Call(decode, self.script, self.keys, self.arguments, self.commands, self.transaction, self.keep_errors, self.block)

    def evalsha(self) -> Command:
        assert self.script is not None
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)

    def eval(self) -> Command:
        assert self.script is not None
        return ("EVAL", self.script.source, len(self.keys), *self.keys, *self.arguments)
