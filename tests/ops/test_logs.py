"""Log lines: JSON for machines, text for people, extra fields in both."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import LogConfig
from ops.logs import configure_logging, resolve_format


def log_one(monkeypatch: pytest.MonkeyPatch, config: LogConfig) -> str:
    configure_logging(config, "api")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)  # after configuring: a display may take stderr over at any time
    log = logging.getLogger("test")
    log.debug("unheard")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("took %d ms", 5, extra={"request_id": "r-1"})
    return stream.getvalue()


def test_json_logs_have_the_named_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = log_one(monkeypatch, LogConfig(log_format="json")).splitlines()
    record = json.loads(line)
    assert {name: record[name] for name in ("level", "message", "role", "request_id", "logger")} == {
        "level": "error",
        "message": "took 5 ms",
        "role": "api",
        "request_id": "r-1",
        "logger": "test",
    }
    assert "ValueError: why" in record["exc_info"] and record["time"].endswith("+00:00")


def test_json_of_anything_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging(LogConfig(log_format="json"), "api")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logging.getLogger("test").warning("\u00e4\u20ac", extra={"what": Path("/x"), "when": 0.5, "of": [1, None]}, stack_info=True)
    assert stream.getvalue().isascii() and len(stream.getvalue().splitlines()) == 1
    record = json.loads(stream.getvalue())
    assert (record["message"], record["what"], record["when"], record["of"]) == ("\u00e4\u20ac", "/x", 0.5, [1, None])
    assert "test_json_of_anything" in record["stack_info"]


@pytest.mark.parametrize("what", ["\udcff", 2**70, {"a": {2**70: "\ud800"}}])
def test_json_logs_take_messages_that_are_no_text(monkeypatch: pytest.MonkeyPatch, what: object) -> None:
    """A file's name that is not UTF-8, for one: the line is not lost."""
    configure_logging(LogConfig(log_format="json"), "api")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logging.getLogger("test").warning("read %s", what, extra={"what": what})
    (line,) = stream.getvalue().splitlines()
    assert line.isascii() and json.loads(line)["message"] == f"read {what}"


def test_text_logs_have_level_message_and_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *trace = log_one(monkeypatch, LogConfig(log_format="text")).splitlines()
    assert first.split(" ", 1)[1] == "api         error   took 5 ms  request_id=r-1"
    assert trace[-1] == "ValueError: why"


def test_auto_is_text_on_a_terminal_alone() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert resolve_format(LogConfig(), Terminal()) == "text"
    assert resolve_format(LogConfig(), io.StringIO()) == "json"
    assert resolve_format(LogConfig(log_format="json"), Terminal()) == "json"


def test_warnings_and_uncaught_errors_of_python_are_log_lines() -> None:
    """A signal's SystemExit that meets a finalizer, and a thread that dies."""
    program = """
import threading
from engine.config import LogConfig
from ops.logs import configure_logging

class Final:
    def __del__(self):
        raise SystemExit(1)

def die():
    raise ValueError("thread's end")

configure_logging(LogConfig(log_format="json"), "api")
Final()
thread = threading.Thread(target=die, name="doomed")
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert "__del__" in first["message"] and "SystemExit" in first["exc_info"]
    assert second["message"] == "thread doomed died" and "thread's end" in second["exc_info"]
