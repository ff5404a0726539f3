"""Reader processes as the API server sees them: started when a large body comes and all that run are busy."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from api.errors import RETRY_AFTER, BadRequest, ServiceUnavailable
from api.model_files import ServedModel
from api.preparation.parcels import BODY, HEADER_BYTES, MODEL, DropBody, LoadModel, ReadBody, Work, pack, payload_size, unpack

R = TypeVar("R")
logger = logging.getLogger("headrace.api")

LONGEST_SECONDS = 60.0  # that one command may take


class ReaderProcess:
    """One process, from its start to its end. Commands are answered one by one. All methods raise ServiceUnavailable at its end."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._ended = False
        self._turn = asyncio.Lock()
        self._exchanges: set[asyncio.Task[bytes]] = set()
        self._loaded: set[str] = set()  # content hashes of model files

    @property
    def num_waiting(self) -> int:
        """Commands that are not answered yet."""
        return len(self._exchanges)

    @property
    def ended(self) -> bool:
        return self._ended or (self._process is not None and self._process.returncode is not None)

    async def read(self, number: int, schema: Any, raw: bytes) -> BaseModel:
        """Parse a body and keep it as `number`. Returns its head. Raises InvalidRequest."""
        head: BaseModel = await self._ask(pack(ReadBody(number, schema, len(raw)), _no_name), raw)
        return head

    async def work(self, number: int, head: BaseModel, function: Callable[..., R], arguments: tuple[Any, ...]) -> R:
        """The result of `function` on `arguments`, in which `head` stands for the body `number`. The body is gone then. Raises the
        function's ApiErrors."""
        (model,) = (argument for argument in arguments if isinstance(argument, ServedModel))
        await self._load(model)

        def name(value: Any) -> Any:
            if value is head:
                return BODY, number
            return (MODEL, (model.files.content_hash, model.outline)) if value is model else None

        result: R = await self._ask(pack(Work(number, function, arguments), name), find=lambda _: model)
        return result

    def drop(self, number: int) -> None:
        """Forget the body `number`, some time."""
        self._begin(pack(DropBody(number), _no_name), b"")

    async def close(self) -> None:
        self._kill()
        if self._process is not None:
            await self._process.wait()

    def _kill(self) -> None:
        self._ended = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _load(self, model: ServedModel) -> None:
        files = model.files
        if files.content_hash not in self._loaded:
            command = LoadModel(model.name, files.content_hash, files.bundle, files.template_source)
            await self._ask(pack(command, _no_name))
            self._loaded.add(files.content_hash)

    async def _ask(self, frame: bytes, raw: bytes = b"", find: Callable[[Any], Any] = lambda name: None) -> Any:
        """The answer to a command. An exchange that has begun goes on when its waiting task is cancelled; the next one follows."""
        good, value = unpack(await asyncio.shield(self._begin(frame, raw)), find)
        if not good:
            raise value
        return value

    def _begin(self, frame: bytes, raw: bytes) -> asyncio.Task[bytes]:
        exchange = asyncio.create_task(self._exchange(frame, raw))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        exchange.add_done_callback(
            lambda exchange: exchange.cancelled() or exchange.exception()
        )  # read, even if no task awaits it any more
        return exchange

    async def _exchange(self, frame: bytes, raw: bytes) -> bytes:
        async with self._turn:
            if self.ended:
                raise _gone()
            try:
                async with asyncio.timeout(LONGEST_SECONDS):
                    return await self._send_and_receive(frame, raw)
            except TimeoutError:
                self._kill()
                raise BadRequest(f"The request could not be read within {LONGEST_SECONDS:.0f} seconds.") from None
            except (OSError, EOFError) as error:
                logger.error("a reader process ended: %s", error)
                self._kill()
                raise _gone() from error

    async def _send_and_receive(self, frame: bytes, raw: bytes) -> bytes:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "api.preparation.reader"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(),
            )
        commands, answers = self._process.stdin, self._process.stdout
        assert commands is not None
        assert answers is not None
        commands.writelines([frame, raw])
        await commands.drain()
        return await answers.readexactly(payload_size(await answers.readexactly(HEADER_BYTES)))


class HeldBody:
    """A large body in the reader process that keeps it, while this context lasts. `head`: the part that this process has."""

    def __init__(self, reader: ReaderProcess, number: int, head: BaseModel) -> None:
        self.head = head
        self._reader: ReaderProcess | None = reader  # None: the reader works on the body
        self._number = number

    async def work(self, function: Callable[..., R], *arguments: Any) -> R:
        """Run `function(*arguments)` where the body is, once. `head` stands for the body; one argument is a ServedModel."""
        reader, self._reader = self._reader, None
        assert reader is not None, "a body is worked on once"
        return await reader.work(self._number, self.head, function, arguments)

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *reason: object) -> None:
        if self._reader is not None:
            self._reader.drop(self._number)


class Readers:
    """The reader processes, at most `count` at a time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers = itertools.count(1)
        self._readers: list[ReaderProcess] = []

    async def read(self, schema: Any, raw: bytes) -> HeldBody:
        """The body `raw`, parsed into a `schema`. Raises InvalidRequest, ServiceUnavailable."""
        reader, number = self._pick(), next(self._numbers)
        try:
            return HeldBody(reader, number, await reader.read(number, schema, raw))
        except asyncio.CancelledError:
            reader.drop(number)
            raise

    async def close(self) -> None:
        for reader in self._readers:
            await reader.close()
        self._readers.clear()

    def _pick(self) -> ReaderProcess:
        """The least busy reader; a new one, where all are busy and more are allowed."""
        self._readers = [reader for reader in self._readers if not reader.ended]
        least = min(self._readers, key=lambda reader: reader.num_waiting, default=None)
        if least is not None and (least.num_waiting == 0 or len(self._readers) == self._count):
            return least
        self._readers.append(ReaderProcess())
        return self._readers[-1]


def _no_name(value: Any) -> None:
    return None


def _gone() -> ServiceUnavailable:
    return ServiceUnavailable("The process that reads large requests ended. Try again.", headers=RETRY_AFTER)


def _environment() -> dict[str, str]:
    """The reader's packages are those of this process, wherever it was started."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *(path or os.getcwd() for path in sys.path)])}
