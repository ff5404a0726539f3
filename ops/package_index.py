"""A wheel out of the user's package index, as pip would find it, resumed where an earlier download broke off."""

from __future__ import annotations

import ast
import html
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlsplit

import httpx

from ops.errors import CommandError

Progress = Callable[[float], None]  # share done, 0 to 1

_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)  # seconds: a read timeout is between two chunks, not for the whole file


class DownloadError(CommandError):
    """The index could not be reached or does not have the file; the message says why."""


@dataclass(frozen=True)
class Wheel:
    """One released file. Its size is for progress only; the caller checks the content."""

    project: str
    version: str
    filename: str
    num_bytes: int


def download_wheel(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """The wheel as a file in `folder`; `FILENAME.part` there is what an earlier call left and is gone on with.

    One caller at a time and folder. First straight from the index, which can resume; where that fails, by pip, which knows all that
    a user may have set up: mirrors with credentials, local folders, proxies. Raises DownloadError, and OSError on a full disk.
    """
    try:
        return _download_directly(wheel, folder, _pip_settings(), progress)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, DownloadError) as error:  # of a page that is none, too
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return _download_by_pip(wheel, folder, progress, reason)


def _pip_settings() -> dict[str, str]:
    """pip's effective settings by long option name: of its files and of PIP_* variables."""
    found: dict[str, str] = {}
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "config", "list"]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        for section in ("global.", "download.", ":env:."):  # the later wins
            for line in lines:
                if line.startswith(section):
                    name, _, value = line.removeprefix(section).partition("=")
                    found[name] = str(ast.literal_eval(value))
    for name, value in os.environ.items():
        if name.startswith("PIP_"):
            found[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return found


def _default_index() -> str:
    """The index that pip asks when nothing is configured, by its own word; empty where there is no pip to say so."""
    program = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout.strip()


def _download_directly(wheel: Wheel, folder: Path, settings: dict[str, str], progress: Progress) -> Path:
    index = settings.get("index-url") or _default_index()
    if settings.get("no-index", "false").lower() not in ("false", "0", "no", "off", "") or urlsplit(index).scheme not in (
        "http",
        "https",
    ):
        raise DownloadError("no index over HTTP is configured")
    trust = httpx.create_ssl_context()
    if "cert" in settings:
        try:
            trust.load_verify_locations(cafile=settings["cert"])
        except OSError as error:
            raise DownloadError(f"the certificates in {settings['cert']} cannot be used: {error}") from error
    with httpx.Client(verify=trust, follow_redirects=True, timeout=_TIMEOUT, proxy=settings.get("proxy")) as client:
        url = _find(client, f"{index.rstrip('/')}/{wheel.project}/", wheel.filename)
        part = folder / f"{wheel.filename}.part"
        _resume(client, url, part, lambda done: progress(min(1.0, done / wheel.num_bytes)))
    return part.replace(folder / wheel.filename)


def _find(client: httpx.Client, page_url: str, filename: str) -> str:
    """The file's address, from a project page of the simple repository API (PEP 503 in HTML, PEP 691 in JSON)."""
    page = client.get(page_url, headers={"Accept": _ACCEPT}).raise_for_status()
    if "json" in page.headers.get("content-type", ""):
        links = [str(entry["url"]) for entry in page.json()["files"]]
    else:
        links = [html.unescape(link) for link in re.findall(r"""href\s*=\s*["']([^"']+)["']""", page.text)]
    for link in links:
        address = urldefrag(urljoin(str(page.url), link)).url
        if urlsplit(address).path.rsplit("/", 1)[-1] == filename:
            return address
    raise DownloadError(f"{page_url} does not list {filename}")


def _resume(client: httpx.Client, url: str, part: Path, progress: Progress) -> None:
    """Appends to `part` until it is whole; a connection that breaks is taken up again as long as each try brings something."""
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _append(client, url, part, before, progress)
            return
        except httpx.TransportError:
            if not part.exists() or part.stat().st_size <= before:
                raise
            time.sleep(0.5)


def _append(client: httpx.Client, url: str, part: Path, done: int, progress: Progress) -> None:
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={done}-"} if done else {})}
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing
        response.raise_for_status()
        resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
        done = done if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            for chunk in response.iter_raw():
                file.write(chunk)
                done += len(chunk)
                progress(done)


def _download_by_pip(wheel: Wheel, folder: Path, progress: Progress, earlier: str) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(f"{wheel.filename} could not be fetched: {earlier}")
    with tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"]
        # pip keeps its unfinished download under TMPDIR: that is how its progress can be seen
        environment = {**os.environ, "TMPDIR": scratch, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        with subprocess.Popen(
            [*command, "--dest", scratch, f"{wheel.project}=={wheel.version}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as pip:
            try:
                while pip.poll() is None:
                    progress(min(1.0, _bytes_under(scratch) / wheel.num_bytes))
                    try:
                        pip.wait(0.2)
                    except subprocess.TimeoutExpired:
                        continue
            except BaseException:
                pip.terminate()
                raise
            output = pip.stdout.read() if pip.stdout else ""
        found = next(Path(scratch).glob("*.whl"), None)
        if pip.returncode != 0 or found is None:
            last = next(
                (line.strip() for line in reversed(output.splitlines()) if "ERROR" in line), f"pip ended with code {pip.returncode}"
            )
            raise DownloadError(f"{wheel.filename} could not be fetched: {earlier}; by pip: {last}")
        return found.replace(folder / wheel.filename)


def _bytes_under(folder: str) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:  # moved between listing and looking
                continue
    return total
