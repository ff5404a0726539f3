"""Results of a sitting, one JSON object a line, each written at once, so that an interrupted sitting can continue."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        cut_off = file.read() not in (b"", b"\n")
        file.write(b"\n" * cut_off + json.dumps(record).encode() + b"\n")


def read(path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind, in the order written; none if there is no file. A line that was cut off is left out."""
    found: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return [record for record in found if record["kind"] == kind]
