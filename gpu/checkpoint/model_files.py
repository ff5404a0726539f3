"""A model's place on disk, its name, and the JSON files beside its weights. Torch-free."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from gpu.errors import CheckpointError

MOST_JSON_BYTES = 64 << 20
PART = re.compile(r"-\d{5}-of-\d{5}$")  # how llama.cpp numbers the files of a split model
_HUB_FOLDER = re.compile(r"models--(?:.+--)?(.+)")  # the hub cache's folder of a repository: models--organisation--name


def find_model(path: str | Path) -> Path:
    """A model directory or a file, `~` expanded. A directory that holds nothing but one GGUF model stands for that file.

    Raises CheckpointError where nothing is there, or several GGUF files of which one has to be named.
    """
    try:
        place = Path(path).expanduser()
        is_there = place.exists()
    except (OSError, RuntimeError) as error:  # no permission, a name too long, no such user's home
        raise CheckpointError(f"the model at {path} cannot be opened: {error}") from None
    if not is_there:
        raise CheckpointError(f"there is no model at {path}: give a safetensors directory or a .gguf file")
    found = _gguf_files(place)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{path} holds {len(found)} GGUF files: give the path of one of them ({names})")
    return found[0] if found else place


def model_name(path: str | Path) -> str:
    """How clients call the model at `path` unless they are told another name: the file's name without .gguf, or the directory's.

    The path's own words count, not where its links lead: the hub's cache keeps files under their hashes.
    """
    place = Path(os.path.expanduser(path))
    place = next(iter(_gguf_files(place)), place)
    if place.name in ("", ".."):  # `.` and its like have no name of their own
        place = place.resolve()
    if place.suffix.lower() == ".gguf":
        return PART.sub("", place.stem) or "model"
    if place.parent.name == "snapshots" and (repository := _HUB_FOLDER.fullmatch(place.parent.parent.name)):
        return repository[1]
    return place.name or "model"


def read_text(path: Path, most_bytes: int = MOST_JSON_BYTES) -> str:
    """A whole file of UTF-8. Raises CheckpointError where it is none, or longer than `most_bytes`."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise CheckpointError(f"{path} has more than {most_bytes:,} bytes, which cannot be right")
        return content.decode("utf-8")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """{} where the file is not there. Raises CheckpointError where it holds no JSON object."""
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def _gguf_files(place: Path) -> list[Path]:
    """The GGUF models in a directory without safetensors, of a split one the first part; [] for anything else."""
    if not os.path.isdir(place) or any(place.glob("*.safetensors")):
        return []
    return sorted(file for file in place.glob("*.[gG][gG][uU][fF]") if not PART.search(file.stem) or "-00001-of-" in file.stem)
