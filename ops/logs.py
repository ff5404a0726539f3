"""Logs of every process: JSON lines for machines, short lines on a terminal; `extra` fields (request_id above all) stand in both.

No record ever holds prompt or answer text: nothing in headrace logs it, and this module has no switch that would.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from datetime import UTC, datetime
from typing import IO, Any, cast

import msgspec

from engine.config import LogConfig
from ops.settings import Resolved

logger = logging.getLogger(__name__)

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}
_QUIET = ("asyncio", "httpx", "httpcore", "numba", "kombu", "celery", "uvicorn.error")  # heard from warnings on

_encode = msgspec.json.Encoder(enc_hook=str).encode


def resolve_format(config: LogConfig, stream: IO[str] = sys.stderr) -> str:
    """`auto` is text on a terminal and json elsewhere."""
    if config.log_format != "auto":
        return config.log_format
    return "text" if stream.isatty() else "json"


def configure_logging(config: LogConfig, role: str) -> None:
    """Send all loggers of this process to stderr in the configured form. `role` names the process, as its command does."""
    handler = _StderrHandler()
    handler.setFormatter(_TextFormatter(role) if resolve_format(config) == "text" else _JsonFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_thread_death


def begin_logging(resolved: Resolved, role: str) -> None:
    """Configure this process's logs, and warn about environment variables that were ignored."""
    configure_logging(resolved.config.log, role)
    if resolved.ignored:
        logger.warning(
            "these variables are ignored, because Kubernetes sets them for a service named headrace: %s "
            "(`enableServiceLinks: false` keeps them out of a pod)",
            ", ".join(resolved.ignored),
        )


def _log_unraisable(ignored: sys.UnraisableHookArgs) -> None:
    """Log an exception that no code can catch, such as one raised by a signal handler during a finalizer."""
    caught = (ignored.exc_type, ignored.exc_value, ignored.exc_traceback) if ignored.exc_value is not None else None
    logger.warning("%s: %r", ignored.err_msg or "exception ignored in", ignored.object, exc_info=caught)


def _log_thread_death(death: threading.ExceptHookArgs) -> None:
    caught = (death.exc_type, death.exc_value, death.exc_traceback) if death.exc_value is not None else None
    logger.error("thread %s died", death.thread.name if death.thread else "", exc_info=caught)


class _StderrHandler(logging.StreamHandler[IO[str]]):
    """Looks sys.stderr up at each record, so that a progress display that replaces it for a while keeps its line whole."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    @property
    def stream(self) -> IO[str]:
        return sys.stderr

    @stream.setter
    def stream(self, _: IO[str]) -> None:
        """The base class assigns its own once; there is nothing to keep."""


class _JsonFormatter(logging.Formatter):
    """Lines of ASCII, which every encoding of stderr can write."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            "role": self._role,
        }
        fields.update((key, value) for key, value in record.__dict__.items() if key not in _STANDARD)
        if record.exc_info:
            fields["exc_info"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack_info"] = self.formatStack(record.stack_info)
        try:
            line = _encode(fields).decode()
        except (ValueError, OverflowError, TypeError):  # half a character in a path, integers of hundreds of bits
            return json.dumps(fields, default=str, skipkeys=True)
        return line if line.isascii() else json.dumps(json.loads(line))


class _TextFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        extra = "".join(f"  {key}={value}" for key, value in record.__dict__.items() if key not in _STANDARD)
        line = f"{clock} {self._role:<11} {record.levelname.lower():<7} {record.getMessage()}{extra}"
        if record.exc_info:
            line += "\n" + "".join(traceback.format_exception(*cast(Any, record.exc_info))).rstrip()
        return line
