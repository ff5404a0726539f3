"""A model's place on disk and the JSON files beside its weights. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu.errors import CheckpointError


def find_model(path: str | Path) -> Path:
    """A model directory or a file, `~` expanded. Raises CheckpointError where nothing is there."""
    place = Path(path).expanduser()
    if not place.exists():
        raise CheckpointError(f"there is no model at {path}")
    return place


def read_json(path: Path) -> dict[str, Any]:
    """{} where the file is not there. Raises CheckpointError where it holds no JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content
