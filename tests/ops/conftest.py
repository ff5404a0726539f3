from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that a test calls in its own process configures the logs of all later tests."""
    root = logging.getLogger()
    handlers, hooks = list(root.handlers), (sys.unraisablehook, threading.excepthook)
    levels = {name: logging.getLogger(name).level for name in ("", *logging.root.manager.loggerDict)}
    yield
    sys.unraisablehook, threading.excepthook = hooks
    root.handlers[:] = handlers
    for name in ("", *logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
